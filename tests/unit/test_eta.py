"""How long a job still takes: by cases that the page's script is held to, too, and by jobs that end."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import eta

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("eta_cases.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_the_time_left_is_as_the_case_has_it(case: dict[str, Any]) -> None:
    looks: list[eta.Look] = []
    for look in case["looks"]:
        looks = eta.noted(looks, eta.Look(*look))
    assert eta.seconds_left(looks, case["total"]) == pytest.approx(case["left"], abs=0.001)


def job(lengths: list[int], slots: int, loads: float, refused: int = 0) -> list[eta.Look]:
    """Return what somebody sees who looks every second at a job of such outputs: 10 tokens a second each,
    `slots` at once, told every 2 seconds, after the model was loaded.
    """
    looks, queue, running, done, told = [], list(lengths), list[int](), 0, 0
    for tenth in range(100_000):
        at = tenth / 10
        if at >= loads:
            running += [queue.pop(0) for _ in range(min(slots - len(running), len(queue)))]
            running = [length - 1 for length in running]
            done += running.count(0)
            running = [length for length in running if length]
        told = done if tenth % 20 == 0 else told
        if tenth % 10 == 0:
            looks.append(eta.Look(at, told, refused))
        if told == len(lengths):
            return looks
    raise AssertionError("it never ends")


def errors(looks: list[eta.Look], total: int) -> Iterator[tuple[float, float]]:
    """Yield shares of the job that are done, and by how much of the real time left it is off there."""
    kept: list[eta.Look] = []
    for look in looks:
        kept = eta.noted(kept, look)
        left, real = eta.seconds_left(kept, total), looks[-1].at - look.at
        if left is not None and real:
            yield (look.completed + look.failed) / total, left / real - 1


@pytest.mark.parametrize(
    ("lengths", "loads", "refused"),
    [
        pytest.param([24 * (4 - place % 4) for place in range(164)], 45, 0, id="make run"),
        pytest.param([24 * (4 - place % 4) for place in range(164)], 3, 0, id="loaded"),
        pytest.param([1 + place * 37 % 200 for place in range(1000)], 30, 400, id="refused early"),
        pytest.param([128] * 1000, 20, 0, id="all of one length"),
    ],
)
def test_it_is_about_right_from_a_quarter_to_three_quarters(
    lengths: list[int], loads: float, refused: int
) -> None:
    total = len(lengths) + refused
    found = list(errors(job(lengths, 64, loads, refused), total))
    middle = [abs(off) for share, off in found if 0.25 <= share <= 0.75]
    assert max(middle) < 0.6
    assert statistics.mean(middle) < 0.35


def test_of_one_look_something_is_said_only_when_a_tenth_has_succeeded() -> None:
    assert eta.since_start(eta.Look(60, 4, 50), 100) is None
    assert eta.since_start(eta.Look(60, 20, 20), 100) == pytest.approx(180)


def test_what_is_kept_of_a_long_job_stays_small() -> None:
    looks: list[eta.Look] = []
    for second in range(10_000):
        looks = eta.noted(looks, eta.Look(second, second // 2))
    assert len(looks) <= 200
    assert eta.seconds_left(looks, 10_000) == pytest.approx(10_000, rel=0.02)
