"""One worker for several models: it swaps between them, loses nothing, and ends when none has work."""

import datetime
import itertools
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.model_settings import ModelSettings
from tests.chaos.scene import OwnRedis
from tests.integration.celery_worker import wait_until
from tests.integration.system.conftest import Start
from tests.integration.system.system import System, Worker, said
from tests.integration.system.test_telemetry import scraped, value
from worker.engine import Engine, EngineConfig, Request, Sampling
from worker.engine.tiny import tiny_model

ECHO: dict[str, Any] = {"engine": "echo"}


def two(system: Start, tiny: Path, faults: Sequence[str] = (), **changes: Any) -> System:
    """A system with two echo models, `a` and `b`, whose workers serve both."""
    model = ModelSettings(source=str(tiny), faults=tuple(faults), **ECHO)
    return system(**{"models": {"a": model, "b": model}, "model": "a,b"} | changes)


def ask(one: System, model: str, count: int, **body: Any) -> str:
    return one.submit(said(str(n), f"text {n} of {model}", model=model, **body) for n in range(count))


def complete(one: System, *jobs: str) -> None:
    for job_id in jobs:
        batch = one.finished(job_id)
        counts = batch.request_counts
        assert (batch.status, counts.failed) == ("completed", 0), batch
        one.accounted(job_id, [str(n) for n in range(counts.total)])
    one.left_nothing()


def swaps(worker: Worker) -> list[tuple[str, str]]:
    return [(event["model"], event["to"]) for event in worker.events("swapping")]


def test_two_jobs_of_two_models_are_done_by_one_worker_with_one_swap_each(system: Start, tiny: Path) -> None:
    """The shares of a second would do for many swaps: a model with nothing to do is left, none with work."""
    one = two(system, tiny, ["slow:0.05"], max_running=8, exit_when_idle_seconds=8)
    jobs = [ask(one, name, 60) for name in "ab"]
    worker = one.start_worker(LONGHAUL_SWAP_SHARE="0.001").wait_serving()
    complete(one, *jobs)
    stats, text = worker.stats(), scraped(worker)
    assert sorted(swaps(worker)) in ([("a", "b")], [("b", "a")], [("a", "b"), ("b", "a")])
    assert stats["completed"] == 120
    assert {name: its["groups"] > 0 for name, its in stats["models"].items()} == {"a": True, "b": True}
    assert sum(its["swaps"] for its in stats["models"].values()) == len(swaps(worker))
    assert stats["models"][stats["model"]]["state"] == "loaded"
    for name in "ab":
        finished = value(text, f'longhaul_requests_finished_total{{model="{name}",reason="length"}}')
        assert finished == 60
        assert value(text, f'longhaul_model_unavailable{{model="{name}"}}') == 0
    assert worker.process.wait(40) == 0, worker.log[-2000:]
    assert worker.events("retiring")[0]["reason"] == "idle for 8 s"


def test_two_busy_models_alternate_in_turns_much_longer_than_a_swap(system: Start, tiny: Path) -> None:
    one = two(system, tiny, ["slow:0.1"], max_running=4)
    jobs = [ask(one, name, 150) for name in "ab"]
    worker = one.start_worker(LONGHAUL_SWAP_SHARE="0.2").wait_serving()
    complete(one, *jobs)
    models = [event["model"].partition("@")[0] for event in worker.events("serving")]
    assert len(models) > 2, "more than one turn each"
    assert all(left != right for left, right in itertools.pairwise(models))
    turns = list(zip(worker.events("model came"), worker.events("swapping"), strict=False))
    left_busy = [(came, left) for came, left in turns if left["reason"] == "its turn is over"]
    assert left_busy, "a model that has work is left for another"
    for came, left in left_busy:
        cost = came.get("swap_seconds", came.get("load_seconds"))
        assert seconds(left) - seconds(came) >= 4 * cost - 0.05  # events have milliseconds


def seconds(event: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(event["time"]).timestamp()


def test_a_worker_that_is_killed_in_the_second_model_loses_nothing(system: Start, tiny: Path) -> None:
    one = two(system, tiny, ["slow:0.3"], max_running=4)
    jobs = [ask(one, name, 24) for name in "ab"]
    worker = one.start_worker()
    wait_until(lambda: swaps(worker), "a swap", 60)
    _, entered = swaps(worker)[0]
    after = dict(zip("ab", jobs, strict=True))[entered]
    wait_until(lambda: one.done(after) > 0, "something of the second model", 30)
    worker.kill()
    assert one.done(after) < 24
    one.start_worker()
    complete(one, *jobs)


def test_a_model_that_cannot_be_loaded_does_not_keep_the_other_from_its_work(
    system: Start, tiny: Path, tmp_path: Path
) -> None:
    """Its tokenizer is there, so that its jobs are planned; its weights are not."""
    broken = Path(shutil.copytree(tiny, tmp_path / "broken"))
    for weights in broken.glob("*.safetensors"):
        weights.unlink()
    models = {
        "broken": ModelSettings(source=str(broken)),
        "a": ModelSettings(source=str(tiny), **ECHO),
    }
    one = system(models=models, model="all", max_running=8)
    waits = ask(one, "broken", 3)
    wait_until(lambda: one.batch(waits).status == "validating", "created", 10)
    worker = one.start_worker()
    wait_until(lambda: worker.events("model not loaded"), "a load that fails", 60)
    job_id = ask(one, "a", 20)
    assert one.finished(job_id).request_counts.completed == 20
    stats = worker.stats()
    assert stats["state"] == "serving"
    assert stats["models"]["broken"]["state"] == "unavailable"
    assert "broken" in stats["models"]["broken"]["reason"]
    assert len(worker.events("model not loaded")) == 1, "not again before a pause"
    assert one.done(waits) == 0
    assert one.batch(waits).status == "in_progress"


def slow_to_load(system: Start, tiny: Path, **changes: Any) -> tuple[System, Worker, str]:
    """Return a system whose worker, of `a` and `b`, is about to load `b` for a job; that takes seconds."""
    models = {
        "a": ModelSettings(source=str(tiny), **ECHO),
        "b": ModelSettings(source=str(tiny), faults=("load:6",), **ECHO),
    }
    one = system(models=models, model="a,b", **changes)
    worker = one.start_worker().wait_serving()
    job_id = ask(one, "b", 5)
    wait_until(lambda: swaps(worker), "a swap", 30)
    return one, worker, job_id


def test_a_load_is_no_step_that_hangs(system: Start, tiny: Path) -> None:
    one, worker, job_id = slow_to_load(system, tiny, step_timeout_seconds=1)
    complete(one, job_id)
    assert worker.process.poll() is None


@pytest.mark.parametrize("how", ["signal", "retire"])
def test_a_worker_told_to_end_while_it_loads_ends_and_holds_nothing(
    how: str, system: Start, tiny: Path
) -> None:
    one, worker, job_id = slow_to_load(system, tiny, heartbeat_seconds=0.3)
    wait_until(lambda: one.ledger.fleet.present()[0].state == "loading", "loading", 10)
    began = time.monotonic()
    if how == "signal":
        worker.process.terminate()
    else:
        one.ledger.fleet.retire([each.name for each in one.ledger.fleet.present()])
    assert worker.process.wait(20) == 0, worker.log[-2000:]
    assert time.monotonic() - began < 5, "it does not wait for the load"
    assert all(not depth["leased"] for depth in one.ledger.depth().models.values())
    assert one.done(job_id) == 0
    one.start_worker()
    complete(one, job_id)


@pytest.mark.timeout(120)
def test_two_real_models_give_what_each_gives_alone(system: Start, tiny: Path, tmp_path: Path) -> None:
    sources = {"a": tiny, "b": tiny_model(tmp_path / "b", seed=7)}
    models = {name: ModelSettings(source=str(source)) for name, source in sources.items()}
    one = system(models=models, model="a,b", max_running=8)
    jobs = {name: ask(one, name, 12, temperature=0.0, max_tokens=8) for name in sources}
    worker = one.start_worker()
    complete(one, *jobs.values())
    assert swaps(worker)
    texts = {name: contents(one, job_id) for name, job_id in jobs.items()}
    assert texts["a"] != texts["b"]
    for name, source in sources.items():
        assert texts[name] == alone(source, name, 12)


def contents(one: System, job_id: str) -> list[str]:
    output, _ = one.lines(job_id)
    return [line["response"]["body"]["choices"][0]["message"]["content"] for line in output]


def alone(source: Path, name: str, count: int) -> list[str]:
    """Return what an engine of that model alone makes of the same prompts."""
    engine = Engine.load(str(source), EngineConfig(device="cpu"))
    tokenizer = engine.tokenizer
    asked = []
    for n in range(count):
        chat = [{"role": "user", "content": f"text {n} of {name}"}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        asked.append(Request(str(n), ids, Sampling(8, temperature=0.0)))
    found = {completion.id: completion.text for completion in engine.generate(asked)}
    engine.close()
    return [found[str(n)] for n in range(count)]


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[OwnRedis]:
    own = OwnRedis(tmp_path / "redis")
    yield own
    own.stop()


def working(system: Start, tiny: Path, own: OwnRedis) -> tuple[System, Worker, list[str]]:
    """Return a system of a Redis of its own, and a worker that runs one job of `a` while one of `b` waits."""
    models = {
        "a": ModelSettings(source=str(tiny), faults=("slow:1.5",), **ECHO),
        "b": ModelSettings(source=str(tiny), faults=("load:3", "slow:0.3"), **ECHO),
    }
    one = system(models=models, model="a,b", redis_url=own.url, max_running=8, heartbeat_seconds=0.3)
    jobs = [ask(one, "a", 8)]
    worker = one.start_worker()
    wait_until(
        lambda: one.ledger.depth().models.get(one.settings.fingerprints["a"], {}).get("leased"), "a", 60
    )
    jobs.append(ask(one, "b", 8))
    return one, worker, jobs


@pytest.mark.long
@pytest.mark.timeout(150)
@pytest.mark.parametrize("when", ["left", "loading", "came"])
@pytest.mark.parametrize("empty", [False, True], ids=["restarted", "lost"])
def test_redis_may_go_away_in_the_middle_of_a_swap(
    when: str, empty: bool, system: Start, tiny: Path, own_redis: OwnRedis
) -> None:
    one, worker, jobs = working(system, tiny, own_redis)
    loads = 1
    wait_until(lambda: swaps(worker), "a swap", 60)
    if when == "loading":
        time.sleep(1)
    elif when == "came":
        loads = 2
        wait_until(lambda: len(worker.events("model came")) == loads, "loaded", 60)
    own_redis.kill()
    time.sleep(5)
    assert worker.process.poll() is None, worker.log[-2000:]
    own_redis.start(empty=empty)
    wait_until(lambda: answers(one), "Redis is back", 30)
    complete(one, *jobs)
    assert worker.process.poll() is None, worker.log[-2000:]
    worker.process.terminate()
    assert worker.process.wait(30) == 0


def answers(one: System) -> bool:
    try:
        return bool(one.ledger.redis.ping())
    except redis.RedisError:
        return False


def idle(system: Start, tiny: Path, count: int) -> tuple[System, list[Worker]]:
    """Return a system with workers of `a` and `b` that have loaded `a`; `b` takes seconds to load."""
    models = {
        "a": ModelSettings(source=str(tiny), **ECHO),
        "b": ModelSettings(source=str(tiny), faults=("load:3",), **ECHO),
    }
    one = system(models=models, model="a,b", max_running=8, lease_seconds=8)
    workers = [one.start_worker() for _ in range(count)]
    return one, [worker.wait_serving() for worker in workers]


def test_of_idle_workers_one_loads_the_model_of_a_few_requests(system: Start, tiny: Path) -> None:
    one, workers = idle(system, tiny, 3)
    complete(one, ask(one, "b", 4))
    assert sum(len(swaps(worker)) for worker in workers) == 1
    assert sum(its["loads"] for worker in workers for its in worker.stats()["models"].values()) == 4


def test_many_requests_are_for_all_idle_workers(system: Start, tiny: Path) -> None:
    one, workers = idle(system, tiny, 2)
    complete(one, ask(one, "b", 200))
    assert [len(swaps(worker)) for worker in workers] == [1, 1]


def test_who_dies_as_it_loads_keeps_others_from_the_model_for_a_moment_only(
    system: Start, tiny: Path
) -> None:
    one, workers = idle(system, tiny, 2)
    job_id = ask(one, "b", 4)
    wait_until(lambda: any(map(swaps, workers)), "a swap", 30)
    (swapping,) = [worker for worker in workers if swaps(worker)]
    swapping.kill()
    complete(one, job_id)
