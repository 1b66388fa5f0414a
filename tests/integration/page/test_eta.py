"""The page's rule for the time left is that of the commands."""

import pytest

from tests.integration.api.serving import Api
from tests.integration.page.conftest import Open
from tests.unit.test_eta import CASES

_COUNTED = """async (cases) => {
  const { noted, secondsLeft } = await import("./page/eta.js");
  return cases.map(({ looks, total }) => secondsLeft(looks.reduce(noted, []), total));
}"""


def test_the_page_tells_the_same_time_left_as_the_commands(api: Api, visit: Open) -> None:
    told = visit(api.url).evaluate(_COUNTED, CASES)
    assert told == [pytest.approx(case["left"], abs=0.001) for case in CASES]
