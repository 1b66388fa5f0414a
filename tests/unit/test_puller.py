"""What the engine's thread may wait for, and what it may not."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from jobs.ledger import Group, Lease
from jobs.records import PlannedRequest
from tests.unit import planning
from worker import puller
from worker.engine import EngineConfig
from worker.engine.echo import EchoEngine
from worker.held import Held
from worker.watchdog import Watchdog


class AwayLedger:
    """A ledger with one group, that does not answer an admission the first few times."""

    def __init__(self, groups: Sequence[Group], times: int) -> None:
        self.groups, self.times = list(groups), times

    def claim(self, *_: object) -> Group | None:
        return self.groups.pop() if self.groups else None

    def start(self, fingerprint: str, leases: list[Lease]) -> list[str]:
        self.times -= 1
        if self.times >= 0:
            raise redis.ConnectionError("away")
        return []


def planned(id: str, prompt_ids: list[int]) -> PlannedRequest:
    return PlannedRequest(
        id=id,
        job_id="j",
        row=0,
        custom_id=id,
        endpoint="/v1/completions",
        model="m",
        bucket=128,
        created_at=0,
        prompt_ids=prompt_ids,
        params={"max_tokens": 1, "temperature": 0.0, "top_p": 1.0, "stop": [], "seed": 0},
    )


def test_an_admission_that_waits_for_redis_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(puller, "RETRY_SECONDS", 0.1)
    engine = EchoEngine.open(str(planning.save_tokenizer(tmp_path)), EngineConfig())
    hangs: list[float] = []
    dog = Watchdog(0.3, hangs.append)
    done: list[Any] = []
    flusher: Any = SimpleNamespace(put=done.append, hurry=lambda: None)
    lease = Lease(planned("j:0", [1, 2]), "token", "m@0", 1, 0, 0.0)
    ledger: Any = AwayLedger([Group(128, [lease], False, 1)], times=10)
    one = puller.Puller(engine, ledger, "m@0", Held(), flusher, "w", dog)
    dog.start()
    began = time.monotonic()
    assert one.turn()
    assert time.monotonic() - began > 0.9
    assert len(done) == 1
    assert not hangs
    dog.close()


def test_a_worker_is_not_idle_while_finished_rows_are_not_written(tmp_path: Path) -> None:
    # The race: a suspect that it is given ends the process, and what was finished before goes with it.
    engine = EchoEngine.open(str(planning.save_tokenizer(tmp_path)), EngineConfig())
    asked: list[bool] = []

    class Asked(AwayLedger):
        def claim(self, *wanted: object) -> Group | None:
            asked.append(bool(wanted[3]))
            return super().claim()

    lease = Lease(planned("j:0", [1, 2]), "token", "m@0", 1, 0, 0.0)
    flusher: Any = SimpleNamespace(put=lambda done: None, hurry=lambda: None)
    ledger: Any = Asked([Group(128, [lease], False, 1)], times=0)
    held, dog = Held(), Watchdog(60, lambda _: None)
    one = puller.Puller(engine, ledger, "m@0", held, flusher, "w", dog)
    assert one.turn()
    asked.clear()
    assert not one.turn()
    held.drop([lease])
    assert not one.turn()
    assert asked == [False, True]
