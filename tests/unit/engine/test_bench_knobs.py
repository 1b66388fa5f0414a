"""The knobs' benchmark counts what an engine did, with requests at once or one by one."""

import pytest

from bench import knobs
from tests.unit.engine.test_scheduler import open_hashing
from worker.engine import loader

_WORK = [([1, 2, 3, 4, index], 3) for index in range(6)]


@pytest.mark.parametrize("arrivals", [0.0, 0.01])
def test_every_request_is_run_and_timed(tiny_loaded: loader.Loaded, arrivals: float) -> None:
    engine = open_hashing(tiny_loaded)
    found = knobs.measure(engine, _WORK, arrivals)
    assert engine.stats.requests_finished == len(_WORK)
    assert found["output_tokens_per_second"] > 0
    assert 0 <= found["time_to_first_token_p50"] <= found["end_to_end_p50"] <= found["seconds"] + 0.01
    assert found["seconds"] >= arrivals * (len(_WORK) - 1)
    assert found["longest_step_seconds"] <= found["seconds"] + 0.01


def test_each_setting_is_one_of_the_engine() -> None:
    for changed in (*knobs.AT_ONCE, *knobs.ARRIVING):
        knobs.dataclasses.replace(knobs._BASE, **changed)
