"""Jobs that are cancelled or expire in each of their states, twice, also while the worker dies of it."""

import threading
from collections.abc import Callable, Iterator

import pytest

from jobs import finalize
from jobs.embedded import SeaweedServer
from tests.chaos import scene as scenes
from tests.chaos.scene import Moment, Scene
from tests.faulty_http import Proxy, proxied
from tests.integration.system.system import Worker

PLACES = {"validating": "/plan/", "in_progress": "/parts/", "finalizing": "/out/", "completed": ""}
HANG_SECONDS = 1.5
ROWS = 24


@pytest.fixture
def proxy(seaweedfs: SeaweedServer) -> Iterator[Proxy]:
    with proxied(seaweedfs.endpoint_url) as one:
        yield one


def cancel(one: Scene, job_id: str) -> int:
    return one.one.api.http.post(f"/v1/batches/{job_id}/cancel").status_code


def expire(one: Scene, job_id: str) -> int:
    """Move the deadline, since the shortest window is a minute; sweep, as every worker and API does."""
    ledger, prefix = one.one.ledger, f"{{{one.one.settings.namespace}}}:"
    if ledger.redis.exists(f"{prefix}deadlines"):
        ledger.redis.hset(f"{prefix}job:{job_id}", "expires_at", "1")
        ledger.redis.zadd(f"{prefix}deadlines", {job_id: 1}, xx=True)
    ledger.expire_due()
    return 200


ENDS: dict[str, Callable[[Scene, str], int]] = {"cancelled": cancel, "expired": expire}
# The states in which an end comes too late: the job ends as what it is.
LATE = {"finalizing", "completed"}
EVERYDAY = {("validating", "cancelled"), ("in_progress", "expired"), ("finalizing", "cancelled")}


def at(one: Scene, proxy: Proxy, worker: Worker, state: str) -> str:
    """Create a job; return its id when it is in the middle of that state."""
    worker.wait_serving()
    if state == "completed":
        job_id = one.submit(ROWS)
        one.one.finished(job_id)
        return job_id
    hanging = Moment("PUT", PLACES[state], [proxy], HANG_SECONDS)
    job_id = one.submit(ROWS)
    hanging.wait()
    assert one.one.batch(job_id).status == state
    return job_id


@pytest.mark.parametrize(
    ("state", "end"), scenes.tiers([(state, end) for state in PLACES for end in ENDS], EVERYDAY)
)
def test_a_job_ends_before_its_time_twice(on_s3: Scene, proxy: Proxy, state: str, end: str) -> None:
    one = on_s3
    job_id = at(one, proxy, one.one.start_worker(LONGHAUL_S3_ENDPOINT_URL=proxy.url), state)
    one.watch.struck()
    codes = twice_at_once(lambda: ENDS[end](one, job_id))
    assert codes == ([409, 409] if state in LATE and end == "cancelled" else [200, 200])
    one.settle(f"a job {'is cancelled' if end == 'cancelled' else 'expires'} while {state}, twice at once")
    ended_as(one, job_id, "completed" if state in LATE else end)
    before = one.one.batch(job_id)
    codes = twice_at_once(lambda: ENDS[end](one, job_id))
    assert one.one.batch(job_id) == before
    one.one.left_nothing()


@pytest.mark.parametrize("end", scenes.tiers([(end,) for end in ENDS], {("cancelled",)}))
def test_a_job_ends_before_its_time_and_the_one_who_writes_that_is_killed(
    on_s3: Scene, proxy: Proxy, end: str
) -> None:
    one = on_s3
    victim = one.one.start_worker(LONGHAUL_S3_ENDPOINT_URL=proxy.url)
    job_id = at(one, proxy, victim, "in_progress")
    hanging = Moment("PUT", one.random.choice(["/out/", "/manifest.json"]), [proxy], HANG_SECONDS)
    ENDS[end](one, job_id)
    hanging.wait()
    victim.kill()
    one.watch.struck()
    one.one.start_worker().wait_serving()
    one.watch.over()
    ENDS[end](one, job_id)
    ended = "was cancelled" if end == "cancelled" else "expired"
    one.settle(f"a job that {ended} is finalized by a worker that is killed (-9)")
    ended_as(one, job_id, end)


def twice_at_once(call: Callable[[], int]) -> list[int]:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(call())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return codes


def ended_as(one: Scene, job_id: str, state: str) -> None:
    """Fail unless it ended so, its files are readable, and lines without a result say why."""
    assert one.one.batch(job_id).status == state
    manifest = finalize.found(one.one.store, job_id)
    assert manifest is not None
    for made in manifest.files.values():
        assert len(one.one.api.client.files.content(made["id"]).content) == made["bytes"]
    _, failed = one.one.lines(job_id)
    codes = {line["error"]["code"] for line in failed}
    assert codes <= ({f"batch_{state}"} if state != "completed" else set())
