"""The autoscaler over twins of slots and of the ledger: whom it starts, whom it lets go, what it says."""

import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from jobs import (
    autoscale,
    autoscale_command,
    autoscale_lines,
    cli,
    scaled,
    scaling,
    servers,
    slots,
    worker_log,
)
from jobs.autoscale import Autoscaler
from jobs.ledger_fleet import Due, Load, Present
from jobs.ledger_types import Failing
from jobs.settings import ModelSettings, Settings

HOST = socket.gethostname()


class Slot:
    """A slot whose worker is a number."""

    def __init__(self, name: str, pid: int) -> None:
        self.name, self._pid = name, pid
        self.worker: Any = None
        self.model: str | None = None
        self.retiring = self.came_to_serve = self.silent = self.hung = self.loads = False
        self.reported: str | None = None
        self.end: slots.End | None = None
        self.gone: set[str | None] = set()
        self.locked = False

    @property
    def serving(self) -> bool:
        there = self.worker is not None and self.came_to_serve
        return there and not (self.retiring or self.silent)

    @property
    def starting(self) -> bool:
        return self.worker is not None and not self.came_to_serve and not self.retiring

    @property
    def pid(self) -> int | None:
        return self._pid if self.worker else None

    def may_start(self, model: str | None) -> bool:
        return self.worker is None and model not in self.gone

    def given_up(self, model: str | None) -> bool:
        return model in self.gone

    def start(self, model: str | None) -> None:
        self.worker, self.model = object(), model
        self.retiring = self.came_to_serve = self.silent = self.hung = False

    def served(self) -> float | None:
        if self.worker is None or self.came_to_serve or self.loads:
            return None
        self.came_to_serve = True
        return 20.0

    def ended(self) -> slots.End | None:
        end, self.end = self.end, None
        if end is not None:
            self.worker = None
        return end

    def end_hung(self) -> None:
        self.retiring = self.hung = True
        assert self.model is not None
        self.end = slots.End(self.model, -9, self.came_to_serve, 1, 1.0, "")

    def terminate(self) -> None: ...

    def lock(self) -> None:
        if self.locked:
            raise slots.SlotTaken(pid=1, slot=self.name, namespace="n")

    metrics: str | None = None
    given_back = 0

    def stop(self) -> int:
        self.worker = None
        return self.given_back

    kill = unlock = stop


class Fleet:
    """A ledger's fleet with what the test puts there."""

    def __init__(self) -> None:
        self.loads: dict[str, Load] = {}
        self.units = 0
        self.workers: list[Present] = []
        self.told: list[str] = []
        self.retired: list[str] = []
        self.left: list[str] = []
        self.known: dict[str, tuple[float, float]] = {}
        self.away, self.mine = False, True
        self.turns: list[str] = []
        self.fails: list[Failing] = []

    def load(self, names: list[str]) -> tuple[dict[str, Load], int]:
        if self.away:
            raise redis.ConnectionError("gone")
        return {name: self.loads.get(name, Load()) for name in names}, self.units

    def present(self) -> list[Present]:
        return self.workers

    def failing(self) -> list[Failing]:
        return self.fails

    def retire(self, names: list[str]) -> None:
        self.told += names
        self.retired += [name for name in names if name not in self.retired]

    def leave(self, name: str) -> None:
        self.left.append(name)

    def take_turn(self, name: str, who: str, seconds: float) -> bool:
        if not self.mine:
            return False
        self.turns.append(who)
        return True

    def pace(self, name: str) -> tuple[float | None, float | None]:
        return self.known.get(name, (None, None))

    def note_pace(self, name: str, rate: float, startup: float) -> None:
        self.known[name] = (rate, startup)


class World:
    def __init__(
        self,
        models: tuple[str, ...] = ("m",),
        places: int = 4,
        model: str | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        named = {name: ModelSettings(source="x", engine="echo") for name in models}
        self.settings = Settings(models=named, model=model, scale_idle_seconds=10, **settings)
        self.fingerprints = self.settings.fingerprints
        self.fleet, self.now = Fleet(), 0.0
        self.fleet.known = dict.fromkeys(self.fingerprints.values(), (100.0, 20.0))
        self.slots = [Slot(f"gpu {number}", 100 + number) for number in range(places)]
        self.control = Slot("control", 99) if len(models) > 1 and not model else None
        self.said: list[tuple[str, dict[str, Any]]] = []
        policy = scaling.Policy(
            most=places, target_seconds=100, idle_seconds=10, spare_seconds=10, startup_share=0.5, fill=0.5
        )
        given: Any = (self.fleet, self.slots)
        control: Any = self.control
        self.scaler = Autoscaler(
            self.settings,
            given[0],
            given[1],
            policy,
            lambda event, facts: self.said.append((event, facts)),
            control,
            clock=lambda: self.now,
            **options,
        )

    def turns(self, count: int = 1, seconds: float = 2) -> None:
        for _ in range(count):
            self.now += seconds
            self.scaler.turn()

    def put(self, name: str = "m", **load: Any) -> None:
        self.fleet.loads[self.fingerprints[name]] = Load(**load)

    def reports(self, *held: int, name: str = "m") -> None:
        """Have the workers in the first slots report, with so many requests each."""
        self.fleet.workers = [
            Present(f"w{place}", HOST, 100 + place, self.fingerprints[name], "serving", count, 0, 0.0, 64)
            for place, count in enumerate(held)
        ]

    def running(self, name: str | None = "m") -> list[str]:
        return [slot.name for slot in self.slots if slot.worker and slot.model == name and not slot.retiring]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [facts for event, facts in self.said if event == name]


def test_an_open_unit_is_enough_for_one_worker() -> None:
    world = World()
    world.turns()
    assert world.running() == []
    world.fleet.units = 1
    world.turns(5)
    assert world.running() == ["gpu 0"]
    assert [facts["to"] for facts in world.events("scale")] == [1], "one line for one decision"


def test_outputs_are_expected_to_be_as_long_as_those_so_far() -> None:
    load = Load(queued=8, leased=2, tokens=1000, finished=4, prompt=400, completion=80)
    assert scaled.tokens_left(load) == 1000 + 10 * 20
    assert scaled.tokens_left(Load(queued=10, finished=4, prompt=400, completion=80)) == 10 * 120
    due = Load(queued=1, finished=4, completion=80, due=(Due(60, 3, 300),))
    assert scaled.depth_of(due, 2) == scaling.Depth(1, 0, 2, ((60, 360),))


def test_as_many_start_as_the_rate_known_from_before_asks_for() -> None:
    world = World()
    world.put(queued=1000, tokens=30_000)
    world.turns(3)
    assert world.running() == ["gpu 0", "gpu 1", "gpu 2"]


def test_idle_workers_go_first_then_those_that_hold_least() -> None:
    world = World()
    world.put(queued=1000, tokens=40_000)
    world.turns()
    world.put(leased=33)
    world.reports(30, 0, 3, 9)
    world.turns(20)
    assert world.fleet.retired == ["w1", "w2"], "33 requests are more than half a batch: two workers"
    assert world.running() == ["gpu 0", "gpu 3"]
    assert [facts["held"] for facts in world.events("retire")] == [0, 3]


def test_a_slot_is_free_again_when_its_worker_has_ended() -> None:
    world = World(places=1)
    world.put(queued=10, tokens=100)
    world.turns()
    world.put()
    world.reports(0)
    world.turns(20)
    assert world.fleet.retired == ["w0"]
    world.slots[0].end = slots.End("m", 0, True, 0, 0.0, "")
    world.put(queued=10, tokens=100)
    world.turns(2)
    assert world.running() == ["gpu 0"]
    assert world.events("ended") == [{"slot": "gpu 0", "model": "m", "status": 0}]


def test_a_worker_that_died_does_not_count_though_it_reported_just_before() -> None:
    world = World(places=2)
    world.put(queued=10, tokens=100)
    world.turns()
    world.reports(10)
    world.slots[0].end = slots.End("m", -9, True, 1, 1.0, "  its words")
    world.turns()
    assert world.fleet.left == ["w0"]
    assert len(world.running()) == 1
    (facts,) = world.events("crashed")
    assert "exit status -9" in autoscale_lines.line("crashed", facts)
    assert "its words" in autoscale_lines.line("crashed", facts)


def test_without_redis_all_stays_and_is_said_once() -> None:
    world = World()
    world.put(queued=10, tokens=100)
    world.turns()
    world.fleet.away = True
    world.turns(50)
    world.fleet.away = False
    world.turns()
    assert world.running() == ["gpu 0"]
    assert len(world.events("redis_away")) == len(world.events("redis_back")) == 1


def test_what_finished_while_redis_was_away_does_not_make_workers_look_fast() -> None:
    world = World()
    world.put(queued=1000, tokens=40_000, prompt=0)
    world.turns()
    world.reports(64)
    world.turns(2)
    world.fleet.away = True
    world.turns(100)
    world.fleet.away = False
    world.put(queued=1000, tokens=40_000, prompt=10**9)
    world.turns(60)
    assert world.fleet.known[world.fingerprints["m"]][0] <= 100


def test_workers_of_other_machines_count_and_silent_ones_do_not() -> None:
    world = World()
    world.put(queued=1000, tokens=30_000)
    far = Present("far", "elsewhere", 5, world.fingerprints["m"], "serving", 64, capacity=64)
    world.fleet.workers = [far, Present("old", "elsewhere", 6, far.model, "serving", age_seconds=50)]
    world.turns()
    assert world.running() == ["gpu 0", "gpu 1"]


def hangs(world: World, seconds: float) -> list[int]:
    """Let so much time pass; return after how many seconds workers were killed."""
    world.turns(int(seconds / 2))
    return [facts["seconds"] for facts in world.events("hung")]


def test_a_worker_that_hangs_while_it_loads_is_ended_and_another_started() -> None:
    world = World(places=1)
    world.slots[0].loads = True
    world.put(queued=10, tokens=100)
    assert hangs(world, 1790) == []
    assert hangs(world, 20) == [1802]
    assert world.events("crashed")[0]["status"] == -9
    assert len(world.events("start")) == 2
    (facts,) = world.events("hung")
    assert autoscale_lines.line("hung", facts) == (
        "gpu 0: the worker of m has been loading for 1802 s; it is killed"
    )


def test_who_is_known_to_take_long_to_start_may_take_five_times_as_long() -> None:
    world = World(places=1)
    world.scaler._models[0].startup_seconds = 1000.0
    world.slots[0].loads = True
    world.put(queued=10, tokens=100)
    assert hangs(world, 4990) == []
    assert hangs(world, 20) == [5002]


def test_a_limit_of_nothing_is_none() -> None:
    world = World(places=1, settings={"scale_startup_limit_seconds": 0, "step_timeout_seconds": 0})
    world.slots[0].loads = True
    world.put(queued=10, tokens=100)
    assert hangs(world, 4_000) == []


def test_a_worker_that_hangs_in_a_swap_is_ended_too() -> None:
    world = World(places=1)
    world.put(queued=10, tokens=100)
    world.turns(2)
    world.reports(0)
    assert hangs(world, 3000) == []
    world.fleet.workers = [replace(each, state="loading") for each in world.fleet.workers]
    assert hangs(world, 2000) == [1802]


def test_a_worker_elsewhere_that_hangs_while_it_loads_does_not_count_for_ever() -> None:
    world = World()
    far = Present("far", "elsewhere", 5, world.fingerprints["m"], "loading")
    world.fleet.workers = [far]
    world.put(queued=10, tokens=100)
    world.turns(800)
    assert world.running() == []
    world.turns(106)
    assert world.running() == ["gpu 0"]


def test_for_a_worker_that_says_nothing_any_more_another_is_started() -> None:
    world = World(places=2)
    world.put(queued=10, tokens=100)
    world.turns(2)
    world.reports(10)
    world.turns(100)
    assert world.running() == ["gpu 0"]
    world.fleet.workers = []
    world.turns(10)
    assert world.running() == ["gpu 0"], "its leases may not have run out"
    world.turns(10)
    assert world.running() == ["gpu 0", "gpu 1"]
    assert world.events("hung") == []
    assert hangs(world, 890) == [902]
    assert world.events("hung")[0]["reason"] == "silent"


def test_a_worker_is_not_silent_because_redis_or_the_autoscaler_were_stopped() -> None:
    world = World(places=2)
    world.put(queued=10, tokens=100)
    world.turns(2)
    world.fleet.away = True
    world.turns(2000)
    world.fleet.away = False
    world.turns(10)
    world.reports(10)
    world.turns(1, seconds=100_000)
    world.turns(10)
    assert world.running() == ["gpu 0"]
    assert not world.events("hung")


def test_an_autoscaler_that_was_stopped_does_not_let_workers_go_at_its_first_look() -> None:
    world = World(places=2)
    world.put(queued=10, tokens=100)
    world.scaler._models[0].startup_seconds = 200.0
    world.turns(2)
    world.put()
    world.reports(0)
    world.turns()
    world.turns(1, seconds=100_000)
    assert world.fleet.retired == []


def test_who_is_to_retire_is_told_again_by_a_redis_that_lost_all() -> None:
    world = World(places=1)
    world.put(queued=10, tokens=100)
    world.turns()
    world.put()
    world.reports(0)
    world.turns(60)
    told = world.fleet.told.count("w0")
    world.turns()
    assert world.fleet.told.count("w0") == told + 1, "it reports as if it had not heard"
    world.fleet.workers = [replace(each, state="retiring") for each in world.fleet.workers]
    world.turns(10)
    assert world.fleet.told.count("w0") == told + 1


def test_a_worker_serves_when_it_reports_so_whatever_its_log_says(tmp_path: Path) -> None:
    slot = slots.Slot("gpu 0", {}, tmp_path, Settings())
    assert slot.served() is None
    slot.worker = servers.Server("w", [sys.executable, "-c", "import time; time.sleep(60)"], slot._log)
    try:
        assert slot.served() is None
        slot._log.unlink()
        assert slot.served() is None, "a log that was taken away says nothing"
        assert slot.worker.tail() == "  (nothing)"
        slot.reported = "serving"
        assert slot.served() is not None
    finally:
        slot.kill()


def test_while_another_autoscaler_moves_this_one_does_not() -> None:
    world = World()
    world.fleet.mine = False
    world.put(queued=1000, tokens=30_000)
    world.turns(5)
    assert world.running() == []
    assert world.said == []
    world.fleet.mine = True
    world.turns(5)
    assert len(world.running()) == 3
    assert len(world.fleet.turns) == 1, "only who moves needs the turn"


def test_a_model_without_a_worker_gets_a_slot_after_its_turn_and_not_at_once() -> None:
    world = World(("m", "n"), places=1)
    world.put(queued=1000, tokens=1e6)
    world.turns()
    assert world.running("m") == ["gpu 0"]
    world.put("n", queued=10, tokens=100)
    world.reports(64)
    world.turns(int(autoscale.TURN_SECONDS / 2) - 5)
    assert world.running("m") == ["gpu 0"]
    world.turns(20)
    assert world.fleet.retired == ["w0"]
    world.slots[0].end = slots.End("m", 0, True, 0, 0.0, "")
    world.fleet.workers = []
    world.turns(2)
    assert world.running("n") == ["gpu 0"]
    world.turns(int(autoscale.TURN_SECONDS / 2) - 20)
    assert world.running("n") == ["gpu 0"], "it does not lose it again at once"


def test_slots_are_shared_by_what_is_left() -> None:
    world = World(("m", "n"), places=4)
    world.put(queued=1000, tokens=60_000)
    world.put("n", queued=1000, tokens=20_000)
    world.turns()
    assert (len(world.running("m")), len(world.running("n"))) == (3, 1)


def test_units_of_several_models_have_a_worker_of_their_own_until_others_serve() -> None:
    world = World(("m", "n"), places=1)
    assert world.control is not None
    world.fleet.units = 1
    world.turns()
    assert world.control.worker is not None
    assert world.control.model is None
    world.put(queued=10, tokens=100)
    world.turns()
    mine = Present("c", HOST, 99, None, "serving")
    model = Present("w0", HOST, 100, world.fingerprints["m"], "serving", 10)
    world.fleet.workers = [mine, model]
    world.turns()
    assert world.fleet.retired == ["c"]


def test_another_autoscaler_of_the_machine_may_have_the_worker_for_control() -> None:
    world = World(("m", "n"), places=1)
    assert world.control is not None
    world.control.locked = True
    world.fleet.units = 1
    world.turns()
    assert world.control.worker is None
    world.control.locked = False
    world.turns()
    assert world.control.worker is not None


@pytest.mark.parametrize(
    ("event", "facts", "expected"),
    [
        ("start", {"slot": "gpu 0", "model": "m", "pid": 5}, "gpu 0: starting a worker of m (pid 5)"),
        ("serving", {"slot": "gpu 0", "model": None, "seconds": 3.5}, "gpu 0: serving control after 3.5 s"),
        ("ended", {"slot": "cpu 1", "model": "m", "status": 0}, "cpu 1: the worker of m has ended"),
        ("redis_back", {}, "Redis answers again"),
        ("redis_away", {"reason": "no"}, "Redis does not answer: no"),
        ("stopping", {"workers": 2, "reason": "because"}, "stopping 2 workers: because"),
        (
            "serving",
            {"slot": "gpu 0", "model": "m", "seconds": 3.5, "metrics": "127.0.0.1:9464"},
            "gpu 0: serving m after 3.5 s; metrics at 127.0.0.1:9464",
        ),
        (
            "unit_fails",
            {"job": "b1", "unit": "plan", "failures": 1, "reason": "gone."},
            "b1: its step 'plan' failed and is tried again: gone.",
        ),
        ("not_loaded", {"model": "m", "reason": "gone."}, "m is not loaded by a worker that should: gone."),
        ("stopped", {"workers": 1, "given_back": 2}, "stopped: 1 worker ended, 2 requests given back"),
        ("stopped", {"workers": 0, "given_back": 0}, "stopped: no worker ran"),
        (
            "watching",
            {
                "models": ["a", "b"],
                "slots": ["gpu 0", "gpu 1"],
                "min": 0,
                "max": 2,
                "not_scaled": ["c"],
                "dry_run": False,
            },
            "scaling: a, b; 0 to 2 workers on gpu 0, gpu 1; not scaled here: c (LONGHAUL_MODEL)",
        ),
        ("scale", {"model": "m", "from": 1, "to": 3, "others": 0, "reason": "why"}, "m: 1 -> 3 workers: why"),
        (
            "scale",
            {"model": "m", "from": 1, "to": 3, "others": 2, "reason": "why"},
            "m: 1 -> 3 workers besides 2 that others started: why",
        ),
        (
            "would_scale",
            {"model": "m", "from": 0, "to": 1, "others": 0, "reason": "why"},
            "m: would be 0 -> 1 worker: why",
        ),
    ],
)
def test_events_are_lines_that_a_person_reads(event: str, facts: dict[str, Any], expected: str) -> None:
    assert autoscale_lines.line(event, facts) == expected


def test_it_ends_when_no_slot_is_left() -> None:
    world = World(places=2)
    world.fleet.units = 1
    world.turns()
    world.slots[0].end = slots.End("m", 1, False, 5, None, "  no such model")
    world.slots[0].gone = {"m"}
    world.turns()
    (facts,) = world.events("gave_up")
    assert autoscale_lines.line("gave_up", facts).startswith("gpu 0: GIVEN UP for m: 5 workers in a row")
    assert world.running() == ["gpu 1"]
    world.slots[1].end = slots.End("m", 1, False, 5, None, "")
    world.slots[1].gone = {"m"}
    with pytest.raises(autoscale.NoSlotLeft):
        world.turns()


def test_a_dry_run_starts_nothing_and_says_each_change_once() -> None:
    world = World(dry=True)
    world.put(queued=1000, tokens=30_000)
    world.turns(5)
    assert world.running() == []
    assert [facts["to"] for facts in world.events("would_scale")] == [3]
    world.put()
    world.turns(5)
    assert len(world.events("would_scale")) == 1, "nothing would change"
    world.put(queued=1000, tokens=30_000)
    world.turns(5)
    assert [facts["to"] for facts in world.events("would_scale")] == [3, 3]


def test_a_dry_run_counts_the_workers_of_an_autoscaler_beside_it() -> None:
    world = World(dry=True)
    world.put(queued=1000, tokens=30_000)
    far = Present("far", "elsewhere", 5, world.fingerprints["m"], "serving", 64, capacity=64)
    world.fleet.workers = [far]
    world.turns(5)
    assert [(facts["from"], facts["to"]) for facts in world.events("would_scale")] == [(1, 3)]
    world.fleet.workers = [replace(far, name=f"far{number}") for number in range(3)]
    world.turns(5)
    assert len(world.events("would_scale")) == 1, "what is wanted is there"


def test_a_dry_run_tells_of_the_worker_for_control_too() -> None:
    world = World(("a", "b"), dry=True)
    world.fleet.units = 1
    world.turns(5)
    (facts,) = world.events("would_scale")
    assert (facts["model"], facts["to"], facts["reason"]) == (None, 1, "1 unit of a job is open")


def test_what_workers_complain_of_is_said_once_while_it_lasts() -> None:
    world = World(("a", "b"), model="a,b")
    world.fleet.fails = [Failing(f"batch_{number}", "plan", 2, "gone.") for number in range(3)]
    exact = world.fingerprints["b"]
    world.fleet.workers = [Present("w", "h", 5, exact, "serving", unavailable={exact: "no file."})]
    world.turns(5)
    (step,) = world.events("unit_fails")
    assert (step["unit"], step["failures"], step["reason"]) == ("plan", 2, "gone.")
    assert world.events("not_loaded") == [{"model": "b", "reason": "no file."}]
    world.fleet.fails, world.fleet.workers = [], []
    world.turns()
    world.fleet.fails = [Failing("batch_9", "plan", 1, "gone.")]
    world.turns()
    assert len(world.events("unit_fails")) == 2


def test_the_last_line_tells_how_many_requests_were_given_back() -> None:
    world = World(places=2)
    world.scaler.stop()
    assert world.said == [], "it never began"
    world.put(queued=1000, tokens=30_000)
    world.turns()
    world.slots[0].given_back = 3
    world.scaler.stop()
    assert world.said[-1] == ("stopped", {"workers": 2, "given_back": 3})


LOGGED = {
    "json": (
        '{"event": "metrics served", "host": "127.0.0.1", "port": 9470}',
        '{"event": "stopped", "drained": true, "finished": 4, "given_back": 3, "left_to_expire": 0}',
    ),
    "text": (
        'Z info     metrics served [worker.metrics.endpoint] host="127.0.0.1" port=9470',
        "Z info     stopped [worker.supervisor] drained=true finished=4 given_back=3 left_to_expire=0",
    ),
}


@pytest.mark.parametrize("kind", list(LOGGED))
def test_a_workers_log_tells_its_metrics_and_what_it_gave_back(kind: str, tmp_path: Path) -> None:
    script = f"for line in {LOGGED[kind]!r}: print(line)"
    worker = servers.Server("w", [sys.executable, "-c", script], tmp_path / "log")
    worker.process.wait()
    assert worker_log.metrics(worker) == "127.0.0.1:9470"
    assert worker_log.given_back(worker) == 3
    silent = servers.Server("w", [sys.executable, "-c", ""], tmp_path / "other")
    silent.process.wait()
    assert (worker_log.metrics(silent), worker_log.given_back(silent)) == (None, 0)


def test_crashes_at_the_start_are_given_up_and_later_ones_much_later() -> None:
    crashes = slots.Crashes()
    assert [crashes.add(None) for _ in range(5)] == [1, 2, 4, 8, None]
    crashes = slots.Crashes()
    pauses = [crashes.add(3.0) for _ in range(20)]
    assert pauses == [1, 2, 4, 8, 16, 32, *[60] * 13, None]
    crashes = slots.Crashes()
    assert [crashes.add(seconds) for seconds in (3, 3, 3, 10_000, None)] == [1, 2, 4, 1, 2]


def test_a_slot_of_the_same_name_and_namespace_is_locked(tmp_path: Path) -> None:
    def slot(namespace: str, name: str = "gpu 0") -> slots.Slot:
        return slots.Slot(name, {}, tmp_path, Settings(namespace=namespace, redis_url="redis://h/5"))

    first = slot("one-of-a-test", "gpu MIG-GPU-5/1/2")
    assert first._log == tmp_path / "worker-gpuMIG-GPU-5-1-2.log"
    first = slot("one-of-a-test")
    first.lock()
    first.lock()
    try:
        with pytest.raises(slots.SlotTaken, match="gpu 0"):
            slot("one-of-a-test").lock()
        for other in (slot("another-of-a-test"), slot("one-of-a-test", "gpu 1")):
            other.lock()
            other.unlock()
    finally:
        first.unlock()
    again = slot("one-of-a-test")
    again.lock()
    again.unlock()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--gpus", "0,0"], "is not a list of different GPUs"),
        (["--cpus", "1", "--min", "2"], "2 is more than 1"),
        (["--gpus", "a,b"], "is not a list of different GPUs"),
        (["--gpus", "GPU-1,2:0"], "is not a list of different GPUs"),
        (["--gpus", "0", "--cpus", "1"], "exclude each other"),
        (["--max", "0"], "Invalid value for '--max'"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_MODELS", json.dumps({"m": {"source": "x", "engine": "echo"}}))
    result = CliRunner().invoke(cli.main, ["autoscale", *options])
    assert result.exit_code == 2
    assert reason in result.output
    monkeypatch.delenv("LONGHAUL_MODELS")
    assert CliRunner().invoke(cli.main, ["autoscale", *options]).output == result.output, (
        "settings come after"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "0,7"], "--gpus 7: there are 0, 1. Workers may not come to serve."),
        (["--gpus", "0,1", "--max", "3"], "--max 3 is more than there are slots; it is 2."),
        (["--gpus", "GPU-8932f937,MIG-GPU-1/2/3"], ""),
    ],
)
def test_what_looks_like_a_mistake_is_said_first(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "gpus", lambda: ["0", "1"])
    result = CliRunner().invoke(cli.main, ["autoscale", *options])
    said, _, last = result.stderr.partition("longhaul: LONGHAUL_MODELS is empty")
    assert said == (f"longhaul: {words}\n" if words else "")
    assert ". .longhaul/environment" in last


def test_it_begins_by_saying_what_it_watches_and_what_not() -> None:
    models = {name: ModelSettings(source="x", engine="echo") for name in "abc"}
    places: Any = [Slot("gpu 0", 1)]
    policy = scaling.Policy(0, 1)
    some = autoscale_command._watching(Settings(models=models, model="a,b"), places, policy, False)
    assert (some["models"], some["not_scaled"], some["slots"]) == (["a", "b"], ["c"], ["gpu 0"])
    every = autoscale_command._watching(Settings(models=models), places, policy, False)
    assert (every["models"], every["not_scaled"]) == (["a", "b", "c"], [])


def test_it_needs_a_model_and_a_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = CliRunner().invoke(cli.main, ["autoscale", "--cpus", "1"])
    assert (empty.exit_code, "LONGHAUL_MODELS is empty" in empty.output) == (1, True)
    monkeypatch.setenv("LONGHAUL_MODELS", json.dumps({"m": {"source": "x", "engine": "echo"}}))
    monkeypatch.setenv("LONGHAUL_MODEL", "other")
    other = CliRunner().invoke(cli.main, ["autoscale", "--cpus", "1"])
    assert "LONGHAUL_MODEL: 'other' is not in" in other.output
    monkeypatch.setenv("LONGHAUL_MODEL", "m")
    monkeypatch.setattr(slots, "gpus", list)
    result = CliRunner().invoke(cli.main, ["autoscale"])
    assert result.exit_code == 2
    assert "No NVIDIA GPU is found here" in result.output


def test_workers_that_swap_are_scaled_by_what_all_their_models_have_to_do() -> None:
    world = World(("a", "b", "other"), model="a,b")
    world.put("a", queued=1, tokens=10)
    world.put("other", queued=10_000, tokens=10_000_000)
    world.turns(5)
    assert world.running("a,b") == ["gpu 0"]
    world.put("a")
    world.put("b", queued=10_000, tokens=1_000_000)
    world.turns(5)
    assert len(world.running("a,b")) > 1
    both = (world.fingerprints["a"], world.fingerprints["b"])
    world.fleet.workers = [
        Present(f"w{place}", HOST, 100 + place, both[0], "serving", capacity=64, models=both)
        for place in range(4)
    ]
    world.turns(60)
    assert len(world.running("a,b")) > 1, "idle for the moment, but work of the other is left"
    world.put("b")
    world.turns(60)
    assert world.running("a,b") == [], "nothing is left of either"


def test_a_worker_elsewhere_that_swaps_counts_for_the_model_it_has_not_loaded() -> None:
    world = World(("a", "b"))
    both = tuple(world.fingerprints.values())
    world.fleet.workers = [Present("far", "elsewhere", 5, both[0], "serving", 0, capacity=64, models=both)]
    world.put("b", queued=1, tokens=10)
    world.turns(5)
    assert world.running("b") == []
    world.fleet.workers = [Present("far", "elsewhere", 5, both[0], "serving", 0, capacity=64)]
    world.turns(5)
    assert world.running("b") == ["gpu 0"]


def test_an_event_in_json_tells_when_it_was_to_the_millisecond(capsys: pytest.CaptureFixture[str]) -> None:
    before = time.time()
    autoscale_command._json("start", {"slot": "cpu 0"})
    event = json.loads(capsys.readouterr().out)
    assert (event["event"], event["slot"]) == ("start", "cpu 0")
    at = datetime.fromisoformat(event["time"]).timestamp()
    assert before - 0.001 <= at <= time.time()


def test_a_worker_that_cannot_even_be_started_is_counted_and_said(tmp_path: Path) -> None:
    now = 0.0
    (tmp_path / "logs").write_text("no folder")
    slot = slots.Slot("gpu 0", {}, tmp_path / "logs", Settings(), lambda: now)
    for pause in (1, 2, 4, 8, None):
        assert slot.may_start("m")
        slot.start("m")
        assert slot.worker is None
        end = slot.ended()
        assert end is not None
        assert (end.status, end.served, end.pause_seconds) == (1, False, pause)
        assert "File exists" in end.tail
        assert slot.ended() is None
        now += pause or 0
    assert slot.given_up("m")


def test_nothing_ends_because_nobody_reads_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    broken = sys.stdout
    report = autoscale_command._lasting(autoscale_command._json)
    for _ in range(3):
        report("redis_back", {})
    assert sys.stdout is not broken
    sys.stdout.close()
    with pytest.raises(BrokenPipeError):
        broken.close()
