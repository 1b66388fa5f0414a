"""No serious finding of axe-core, in light and dark and on a narrow screen, in any view."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.integration.api.serving import Api, Hand
from tests.integration.page.conftest import Open

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"viewport": {"width": 400, "height": 800}},
}
pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(api: Api, visit: Open, look: str) -> None:
    # axe-core puts a script into the page, which the page's own policy forbids.
    page = visit(api.url, bypass_csp=True, **LOOKS[look])
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    check(page)
    broken, running = jobs(api)
    for path in ("", f"job/{running}", f"job/{broken}", "queue", "job/batch_none"):
        page.goto(f"{api.url}/#/{path}")
        expect(page.get_by_text("Loading…")).to_have_count(0)
        if path == f"job/{running}":
            expect(page.get_by_role("img", name="End to end")).to_be_visible()
            for one in page.get_by_text("Numbers", exact=True).all():
                one.click()
        check(page)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{path} is wider than the screen"
    page.goto(f"{api.url}/#/job/{running}")
    page.get_by_role("button", name="Cancel job").click()
    check(page)


def jobs(api: Api) -> tuple[str, str]:
    """Make a job that failed, and one that runs and has errors."""
    broken = api.create("a")
    Hand(api.context, broken, 1).fail("invalid_json_line", 1)
    running = api.create(
        "a", "b", "c", metadata={"name": "a long name of a job that somebody made", "k": "v"}
    )
    hand = Hand(api.context, running, 3)
    hand.begin()
    hand.part((0, "a", False), (1, "b" * 500, True))
    return broken, running


def check(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    told = [(one["impact"], one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]
    assert not told
