"""When a worker is idle, for how long, and that it goes once and not while there is work."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jobs.ledger_fleet import Load, Present
from worker.presence import Presence, Seen

MODEL = "m@1"
FREE = Seen("serving", held=0, units=0, uses=0, capacity=8)


class Twin:
    """A ledger with what it was told, in place of its `fleet` too."""

    def __init__(self) -> None:
        self.fleet = self
        self.reported: list[Present] = []
        self.queued: dict[str, int] = {}
        self.told = False
        self.units = 0

    def report(self, present: Present) -> bool:
        self.reported.append(present)
        return self.told

    def begun_and_ended(self) -> int:
        return self.units

    def load(self, names: list[str]) -> tuple[dict[str, Load], int]:
        return {name: Load(queued=self.queued.get(name, 0)) for name in names}, 0


class Life:
    def __init__(self, limit: float | None = 10, models: Sequence[str] = (MODEL,)) -> None:
        self.now, self.seen, self.ledger = 0.0, FREE, Twin()
        self.retired: list[str] = []
        ledger: Any = self.ledger
        self.presence = Presence(
            ledger, "w", models, lambda: self.seen, self.retired.append, limit, lambda: self.now
        )

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            self.presence.watch()


def test_a_worker_idle_for_long_enough_retires() -> None:
    life = Life()
    life.pass_time(9)
    assert not life.retired
    life.pass_time(2)
    assert life.retired
    assert life.retired[0] == "idle for 10 s"


@pytest.mark.parametrize(
    "seen",
    [
        Seen("loading", 0, 0, 0),
        Seen("serving", 1, 0, 0),
        Seen("serving", 0, 1, 0),
        Seen("draining", 0, 0, 0),
    ],
)
def test_one_that_loads_or_holds_something_is_not_idle(seen: Seen) -> None:
    life = Life()
    life.pass_time(8)
    life.seen = seen
    life.pass_time(30)
    life.seen = FREE
    life.pass_time(9)
    assert not life.retired
    life.pass_time(2)
    assert life.retired


def test_work_between_two_looks_counts() -> None:
    life = Life()
    for uses in range(5):
        life.seen = Seen("serving", 0, 0, uses)
        life.pass_time(9)
    assert not life.retired


def test_what_waits_for_its_model_keeps_it() -> None:
    life = Life()
    life.ledger.queued[MODEL] = 1
    life.pass_time(50)
    assert not life.retired


@pytest.mark.parametrize("models", [(MODEL,), ()])
def test_a_job_that_is_to_be_planned_or_ended_keeps_it(models: tuple[str, ...]) -> None:
    life = Life(models=models)
    life.ledger.units = 1
    life.pass_time(50)
    assert not life.retired, "its unit may be due only later"
    life.ledger.units = 0
    life.pass_time(11)
    assert life.retired


def test_what_waits_for_any_of_its_models_keeps_it() -> None:
    life = Life(models=(MODEL, "other@1"))
    life.ledger.queued["other@1"] = 1
    life.pass_time(50)
    assert not life.retired
    life.ledger.queued.clear()
    life.pass_time(11)
    assert life.retired


def test_one_of_several_models_says_which_it_serves_now_and_all_that_it_could() -> None:
    life = Life(limit=None, models=(MODEL, "other@1"))
    life.presence.report()
    life.seen = Seen("serving", 0, 0, 0, model="other@1")
    life.presence.report()
    first, second = life.ledger.reported
    assert (first.model, second.model) == (MODEL, "other@1")
    assert first.models == second.models == (MODEL, "other@1")
    assert first.serves(["other@1"])
    assert not Present("w", "h", 1, MODEL, "serving").serves(["other@1"])


def test_without_a_limit_it_stays_and_says_how_long_it_has_been_idle() -> None:
    life = Life(limit=None)
    life.pass_time(50)
    life.presence.report()
    assert not life.retired
    (said,) = life.ledger.reported
    assert (said.idle_seconds, said.state, said.capacity, said.model) == (50, "serving", 8, MODEL)


def test_it_retires_when_told_to_unless_it_ends_already() -> None:
    life = Life(limit=None)
    life.ledger.told = True
    life.presence.report()
    assert life.retired == ["told to"]
    life.seen = Seen("draining", 0, 0, 0)
    life.presence.report()
    assert life.retired == ["told to"]


def test_a_model_that_could_not_be_loaded_is_reported_with_the_reason() -> None:
    life = Life(models=("a@1", "b@1"))
    life.seen = replace(FREE, unavailable={"b@1": "gone"})
    life.presence.report()
    (present,) = life.ledger.reported
    assert (present.may_run("a@1"), present.may_run("b@1")) == (True, False)
    assert present.unavailable == {"b@1": "gone"}


def test_rates_are_those_since_the_last_report_and_another_model_begins_anew() -> None:
    life = Life(limit=None)
    counted = {"tokens_sampled": 50.0, "prefill_tokens_computed": 60, "prefix_tokens_reused": 40}
    life.presence.report()
    life.pass_time(10)
    life.seen = Seen("serving", 4, 0, 1, running=3, engine=counted)
    life.presence.report()
    life.pass_time(5)
    life.seen = Seen("serving", 0, 0, 1, engine={"kv_bytes_in_use": 1, "kv_bytes_budget": 4})
    life.presence.report()
    first, second, third = life.ledger.reported
    assert (first.output_tokens_per_second, first.prefix_hit_ratio, first.kv_usage_ratio) == (0, None, None)
    assert (second.running, second.output_tokens_per_second, second.prompt_tokens_per_second) == (3, 5, 10)
    assert second.prefix_hit_ratio == 0.4
    assert (third.output_tokens_per_second, third.kv_usage_ratio) == (0, 0.25)
