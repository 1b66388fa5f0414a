"""Attending to a shared prefix once for all its requests gives what each of them attending alone gives."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.engine import exactness
from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule
from tests.unit.engine.test_metamorphic import NAMES, outputs
from worker.engine import Request
from worker.engine.step import Step


@pytest.mark.parametrize("name", NAMES)
@given(exactness.requests(most=14), st.sampled_from((0, 100)))
@settings(max_examples=2)
def test_cascade_changes_no_output(
    open_subject: exactness.Open, name: str, requests: list[Request], worth: int
) -> None:
    on, off = (
        outputs(open_subject, name, requests, Schedule(worth_a_part=worth, config={"cascade": cascade}))
        for cascade in (True, False)
    )
    assert on == off
    exactness.check(name, requests, on)


class Watched:
    """A runner that notes the most parts that a step attends to beside the requests' own."""

    def __init__(self, runner: Any) -> None:
        self.layout = runner.layout
        self.most = 0
        self._runner = runner

    def step(self, step: Step) -> Tensor:
        self.most = max(self.most, len(step.shared))
        return self._runner.step(step)


@pytest.mark.parametrize(("cascade", "parts"), [(True, 1), (False, 5)])
def test_with_cascade_requests_share_one_part(
    open_subject: exactness.Open, cascade: bool, parts: int
) -> None:
    engine = Schedule(worth_a_part=0, config={"cascade": cascade}).open(open_subject("llama"))
    watched = Watched(engine._runner)
    engine._stepper.model = watched
    requests = [request(str(i), [7] * 20 + [i], max_tokens=4, ignore_eos=True) for i in range(5)]
    assert len(list(engine.generate(requests))) == 5
    assert watched.most == parts
