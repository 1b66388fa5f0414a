"""Who comes first: a job of many requests, one of few, one of higher priority."""

import time
from collections.abc import Callable

from tests.integration.system.system import System, said

Start = Callable[..., System]


def test_a_small_job_does_not_wait_for_a_large_one(system: Start) -> None:
    # Both lengths, as the large job could hold the engine in its own bucket or fill the one they share.
    one = system(faults=("slow:0.3",), max_running=16)
    one.start_worker().wait_serving()
    large = one.submit(said(f"r{n}", "x" * 200 + f"{n}") for n in range(1500))
    one.wait_done(large, 32)
    began = time.monotonic()
    alike = one.submit(said(f"a{n}", "y" * 200 + f"{n}") for n in range(3))
    shorter = one.submit(said(f"s{n}", f"{n}") for n in range(3))
    assert one.finished(alike, 30).request_counts.completed == 3
    assert one.finished(shorter, 30).request_counts.completed == 3
    waited = time.monotonic() - began
    assert one.batch(large).status == "in_progress"
    assert waited < 20
    one.api.client.batches.cancel(large)
    one.finished(large)
    one.left_nothing()
