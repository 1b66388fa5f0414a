"""What a job survives: workers killed, stopped and drained, requests that kill, a Redis that forgets."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import redis

from jobs import ids, tokens
from jobs.model_settings import ModelSettings
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import MODEL, System, Worker, said
from worker.engine import Engine, EngineConfig, Request, Sampling

Start = Callable[..., System]
MANY = 100


def computed(*workers: Worker) -> int:
    """Return how many requests were claimed by these workers, summed over their groups."""
    return sum(group["requests"] for worker in workers for group in worker.events("group claimed"))


def names(count: int) -> list[str]:
    return [f"r{n}" for n in range(count)]


def test_killed_worker_has_its_requests_run_elsewhere_once(system: Start) -> None:
    # Race: the kill comes after some rows are flushed and others are in the running batch. There are enough
    # that many are left when the second worker serves, however long that takes to start.
    one = system(faults=("slow:0.4",), max_running=4, lease_seconds=3)
    first = one.start_worker().wait_serving()
    job_id = one.submit(said(name, f"text {name}") for name in names(MANY))
    one.wait_done(job_id, 8)
    second = one.start_worker().wait_serving()
    one.wait_done(job_id, 12)
    first.kill()
    killed = time.monotonic()
    done_then = one.done(job_id)
    held = set(_leased(one))
    wait_until(lambda: not held & set(_expired(one)), "taken over", 13)
    assert time.monotonic() - killed < one.settings.lease_seconds + 10
    batch = one.finished(job_id)
    assert batch.request_counts.model_dump() == {"total": MANY, "completed": MANY, "failed": 0}
    one.accounted(job_id, names(MANY))
    # Each finished row was computed once: what the second engine ran is what the first one had not finished.
    assert done_then < MANY
    by_first = [row for row in one.metrics(job_id) if f"-{first.process.pid}-" in row["worker"]]
    stats = second.stats()
    assert stats["completed"] == stats["engine"]["requests_finished"] == MANY - len(by_first)
    assert stats["engine"]["requests_added"] == MANY - len(by_first)
    assert len(by_first) >= 8
    assert MANY <= computed(first, second) <= MANY + 4 + 4
    one.left_nothing()


def test_draws_without_a_seed_are_the_same_after_a_crash(system: Start, tiny: Path) -> None:
    # Race: the kill comes while choices are in the running batch. They are drawn again, by another worker.
    served = ModelSettings(source=str(tiny), dtype="float64")
    one = system(models={MODEL: served}, max_running=4, lease_seconds=2)
    first = one.start_worker().wait_serving()
    sampled = {"max_tokens": 60, "temperature": 1, "n": 2, "ignore_eos": True}
    job_id = one.submit(said(name, f"text {name}", **sampled) for name in names(40))
    one.wait_done(job_id, 2)
    first.kill()
    assert one.done(job_id) < 40
    one.start_worker()
    one.finished(job_id)
    one.accounted(job_id, names(40))
    assert sum(each["attempts"] for each in one.metrics(job_id)) > 0
    tokenizer = tokens.cached(MODEL, served)
    engine = Engine.load(str(tiny), EngineConfig(device="cpu", dtype="float64"))
    requests = []
    for row, name in enumerate(names(40)):
        chat = tokenizer.template.render([{"role": "user", "content": f"text {name}"}])
        wanted = Sampling(60, n=2, ignore_eos=True, seed=ids.seed(ids.request_id(job_id, row)))
        requests.append(Request(name, tokenizer.encode_chats([chat])[0], wanted))
    expected = {done.id: [each.text for each in done.choices] for done in engine.generate(requests)}
    for line in one.lines(job_id)[0]:
        texts = [each["message"]["content"] for each in line["response"]["body"]["choices"]]
        assert texts == expected[line["custom_id"]]
    engine.close()


def test_worker_told_to_stop_drains_and_loses_nothing(system: Start) -> None:
    one = system(faults=("slow:0.5",), max_running=4)
    first = one.start_worker().wait_serving()
    job_id = one.submit(said(name, f"text {name}") for name in names(24))
    one.wait_done(job_id, 4)
    first.signal(signal.SIGTERM)
    assert first.process.wait(one.settings.drain_seconds + 5) == 0
    assert one.ledger.depth().models[one.settings.fingerprints["m"]]["leased"] == 0
    second = one.start_worker()
    assert one.finished(job_id).request_counts.completed == 24
    one.accounted(job_id, names(24))
    # Nothing that the first one finished was run again, and what it released counts no attempt.
    assert computed(first, second) <= 24 + 4
    assert all(row["attempts"] == 0 for row in one.metrics(job_id))


def test_rows_that_are_finished_but_not_written_are_not_given_back_by_a_drain(
    system: Start, tmp_path: Path
) -> None:
    # Race: the stop comes between the end of a request and the part that holds its row.
    trace = tmp_path / "computed"
    one = system(faults=("slow:0.3", f"trace:{trace}"), max_running=4, flush_seconds=5)
    first = one.start_worker().wait_serving()
    job_id = one.submit(said(name, f"text {name}") for name in names(24))
    wait_until(lambda: trace.exists() and len(trace.read_text().split()) >= 8, "some are computed")
    assert one.done(job_id) == 0
    first.signal(signal.SIGTERM)
    assert first.process.wait(one.settings.drain_seconds + 5) == 0
    one.start_worker()
    one.finished(job_id)
    one.accounted(job_id, names(24))
    assert len(trace.read_text().split()) == 24


def test_stopped_worker_that_comes_back_writes_nothing_that_counts(system: Start) -> None:
    # Race: SIGSTOP for longer than the lease; the zombie then finishes its group and tries to complete it.
    one = system(faults=("slow:1.0",), max_running=4, lease_seconds=2, heartbeat_seconds=0.5)
    zombie = one.start_worker().wait_serving()
    job_id = one.submit(said(name, f"text {name}") for name in names(12))
    wait_until(lambda: zombie.events("group claimed"), "claimed")
    zombie.signal(signal.SIGSTOP)
    one.start_worker().wait_serving()
    batch = one.finished(job_id)
    zombie.signal(signal.SIGCONT)
    wait_until(
        lambda: (
            zombie.events("rows refused: their leases were lost")
            or zombie.events("requests dropped: their leases were lost")
        ),
        "the zombie noticed",
    )
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
    one.accounted(job_id, names(12))
    one.left_nothing()


def test_request_that_kills_its_worker_fails_alone(system: Start) -> None:
    one = system(faults=("kill:poison",), max_running=8, lease_seconds=1, heartbeat_seconds=0.3)
    requests = [said(name, f"text {name}") for name in names(8)]
    requests[3] = said("r3", "poison")
    one.start_worker()
    job_id = one.submit(requests)
    deadline = time.monotonic() + 90
    while one.batch(job_id).status != "completed" and time.monotonic() < deadline:
        if one.workers[-1].process.poll() is not None:
            one.start_worker()
        time.sleep(0.1)
    batch = one.finished(job_id, 1)
    assert batch.request_counts.model_dump() == {"total": 8, "completed": 7, "failed": 1}
    one.accounted(job_id, names(8))
    (failed,) = one.lines(job_id)[1]
    assert (failed["custom_id"], failed["response"]) == ("r3", None)
    assert failed["error"]["code"] == "worker_lost"
    assert len(one.workers) <= 5
    one.left_nothing()


def test_redis_that_loses_everything_is_filled_again_from_the_store(system: Start) -> None:
    one = system(faults=("slow:0.3",), max_running=4)
    first = one.start_worker().wait_serving()
    job_id = one.submit(said(name, f"text {name}") for name in names(40))
    one.wait_done(job_id, 12)
    with redis.Redis.from_url(one.settings.redis_url) as client:
        keys = list(client.scan_iter(f"{{{one.settings.namespace}}}:*"))
        client.delete(*keys)
    batch = one.finished(job_id)
    assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
    one.accounted(job_id, names(40))
    # Rows that lay in parts were not computed again; those in flight or not yet flushed may have been.
    assert computed(first) <= 40 + 3 * 4
    wait_until(lambda: one.ledger.depth().control == 0, "control is empty")


def test_long_group_is_not_run_twice_when_messages_are_delivered_again(system: Start) -> None:
    one = system(faults=("slow:4",), max_running=8, lease_seconds=3, heartbeat_seconds=0.5)
    workers = [one.start_worker().wait_serving() for _ in range(2)]
    job_id = one.submit(said(name, f"text {name}") for name in names(8))
    one.finished(job_id)
    one.accounted(job_id, names(8))
    assert computed(*workers) == 8


def _leased(one: System) -> list[str]:
    key = f"{{{one.settings.namespace}}}:leases:{one.settings.fingerprints['m']}"
    return [rid.decode() for rid in one.ledger.redis.zrange(key, 0, -1)]


def _expired(one: System) -> list[str]:
    key = f"{{{one.settings.namespace}}}:leases:{one.settings.fingerprints['m']}"
    return [rid.decode() for rid in one.ledger.redis.zrangebyscore(key, 0, time.time() * 1000)]
