"""Some thousands of the inputs of `make fuzz`; the long tier has a tenth of its million."""

from collections.abc import Iterator

import pytest

from tests.fuzz import runner, targets

NAMES = ["lines", "checks", "body", "creation", "rendering", "grammars"]


@pytest.fixture(scope="module")
def opened() -> Iterator[list[targets.Target]]:
    with targets.opened() as found:
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_read_is_taken_or_refused(opened: list[targets.Target], name: str) -> None:
    for target in opened:
        if target.name.startswith(name):
            done = runner.run(target, round(8000 * target.share), seed=2)
            assert 0.01 < done.taken / done.inputs < 0.99, "inputs must be neither all wrong nor all right"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_hundred_thousand_inputs(opened: list[targets.Target]) -> None:
    for target in opened:
        runner.run(target, round(100_000 * target.share), seed=3)
