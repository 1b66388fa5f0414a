"""A worker of several models does not thrash, starves none, and leaves at once a model that has no work."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from jobs.ledger_fleet import Waiting
from worker import swapping, turns
from worker.turns import Turns

SHARE = 0.1
LOOK_SECONDS = 1.0


@dataclass
class Life:
    """A worker with a clock of its own. It looks around every second; a load takes as long as it is said to.

    `queues` tells what waits of each model at a time. `done(name, now)` hears of each second worked.
    """

    load_seconds: Mapping[str, float]
    queues: Callable[[float], Mapping[str, Waiting]]
    done: Callable[[str, float], None] = lambda name, now: None
    running_seconds: float = 0.0
    broken: frozenset[str] = frozenset()
    share: float = SHARE
    now: float = 0.0
    loads: list[tuple[float, str]] = field(default_factory=list)
    loading_seconds: float = 0.0
    worked: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = Turns(self.load_seconds, self.share, lambda: self.now)

    def run(self, until: float) -> "Life":
        while self.now < until:
            waiting = self.queues(self.now)
            loaded = self.turns.loaded
            busy = loaded is not None and waiting[loaded].requests > 0
            name = self.turns.choose(waiting, busy)
            if name is not None:
                self._swap(name, busy)
            else:
                self._work(busy)
        return self

    def _swap(self, name: str, busy: bool) -> None:
        if self.turns.loaded is not None:
            self.turns.leave()
            self.now += self.running_seconds if busy else 0.0
            self.turns.emptied()
        self.turns.begin(name)
        self.now += self.load_seconds[name]
        self.loading_seconds += self.load_seconds[name]
        self.loads.append((self.now, name))
        if name in self.broken:
            self.turns.failed("no such model")
        else:
            self.turns.came()

    def _work(self, busy: bool) -> None:
        self.now += LOOK_SECONDS
        if busy and (loaded := self.turns.loaded):
            self.worked[loaded] = self.worked.get(loaded, 0.0) + LOOK_SECONDS
            self.done(loaded, self.now)

    def swaps(self) -> int:
        return len(self.loads) - 1


BACKLOG = Waiting(1000, oldest_seconds=1e6)
NOTHING = Waiting()


def always(**waiting: Waiting) -> Callable[[float], Mapping[str, Waiting]]:
    return lambda now: waiting


def test_two_models_that_always_have_work_alternate_in_long_turns() -> None:
    life = Life({"a": 30.0, "b": 30.0}, always(a=BACKLOG, b=BACKLOG)).run(36_000)
    assert [name for _, name in life.loads[:4]] == ["a", "b", "a", "b"]
    turn = swapping.turn_seconds([30.0], SHARE)
    assert turn == pytest.approx(270)
    assert 36_000 / (turn + 30) / 2 < life.swaps() <= 36_000 / (turn + 30)
    assert life.loading_seconds <= 1.01 * SHARE * life.now
    assert life.worked["a"] == pytest.approx(life.worked["b"], rel=0.02)


@pytest.mark.parametrize(
    "share", [0.1, *(pytest.param(share, marks=pytest.mark.long) for share in (0.02, 0.5))]
)
def test_loading_takes_its_share_of_the_time_and_no_more(share: float) -> None:
    life = Life({"a": 20.0, "b": 20.0, "c": 20.0}, always(a=BACKLOG, b=BACKLOG, c=BACKLOG), share=share)
    life.run(100_000)
    assert 0.9 * share < life.loading_seconds / life.now < 1.03 * share
    assert life.swaps() > 10


def test_a_model_that_loads_quickly_gets_as_much_of_the_time_as_one_that_does_not() -> None:
    life = Life({"a": 2.0, "b": 60.0}, always(a=BACKLOG, b=BACKLOG)).run(50_000)
    assert life.worked["a"] == pytest.approx(life.worked["b"], rel=0.05)


def test_a_busy_models_turns_pay_for_one_that_is_swapped_in_for_a_moment_again_and_again() -> None:
    """Every swap to b costs the way back to a as well."""
    backlog = {"b": 0.0}

    def queues(now: float) -> Mapping[str, Waiting]:
        backlog["b"] = backlog["b"] or now
        return {"a": BACKLOG, "b": Waiting(1, now - backlog["b"])}

    life = Life({"a": 30.0, "b": 30.0}, queues, done=lambda name, now: backlog.update({name: 0.0})).run(
        50_000
    )
    assert life.swaps() > 20
    assert life.loading_seconds <= 1.02 * SHARE * life.now


def test_a_model_for_which_nothing_waits_is_never_loaded() -> None:
    life = Life({"a": 30.0, "b": 1.0}, always(a=BACKLOG, b=Waiting(0, 0.0, unfed=500))).run(10_000)
    assert [name for _, name in life.loads] == ["a"]


def test_nothing_to_do_is_no_reason_to_swap() -> None:
    assert Life({"a": 1.0, "b": 1.0}, always(a=NOTHING, b=NOTHING)).run(10_000).swaps() == 0


def test_a_model_without_work_is_left_at_once() -> None:
    life = Life({"a": 30.0, "b": 30.0}, lambda now: {"a": NOTHING, "b": Waiting(int(now > 100), 0.0)})
    life.run(200)
    assert [name for _, name in life.loads] == ["a", "b"]
    assert life.loads[1][0] <= 100 + 2 * LOOK_SECONDS + 30


def test_work_that_is_about_to_be_fed_is_waited_for_as_long_as_a_swap_takes() -> None:
    fed = lambda now: {"a": Waiting(0, 0.0, unfed=9), "b": BACKLOG}  # noqa: E731
    life = Life({"a": 30.0, "b": 5.0}, lambda now: fed(now) if now > 100 else always(a=BACKLOG, b=BACKLOG)(0))
    life.run(140)
    assert len(life.loads) == 2
    assert 130 <= life.loads[1][0] - 5 <= 133


def test_the_first_to_load_is_the_one_that_has_work() -> None:
    life = Life({"a": 1.0, "b": 1.0, "c": 1.0}, always(a=NOTHING, b=Waiting(1, 5.0), c=Waiting(1, 9.0)))
    assert life.run(5).loads[0] == (1.0, "c")


@pytest.mark.parametrize("count", [2, 3, 5])
def test_none_starves(count: int) -> None:
    """A request waits for a turn of each other model at most, and for the loads between."""
    names = [f"m{place}" for place in range(count)]
    since = dict.fromkeys(names, 0.0)
    longest = 0.0

    def done(name: str, now: float) -> None:
        nonlocal longest
        longest = max(longest, now - since[name])
        since[name] = now

    def queues(now: float) -> Mapping[str, Waiting]:
        return {name: Waiting(5, now - since[name]) for name in names}

    life = Life(dict.fromkeys(names, 10.0), queues, done, running_seconds=4.0).run(20_000)
    assert life.swaps() > 20
    turn = swapping.turn_seconds([10.0 + 2.0], SHARE)
    assert longest <= (count - 1) * (turn + LOOK_SECONDS) + count * (10 + 4 + LOOK_SECONDS)
    assert set(life.worked) == set(names)


def test_a_late_comer_waits_for_a_turn_and_then_has_its_own() -> None:
    """One request of b, while a has had work for hours: it does not empty a's batch at once."""
    life = Life({"a": 30.0, "b": 30.0}, lambda now: {"a": BACKLOG, "b": Waiting(now > 5000, now - 5000)})
    life.run(5400)
    ((_, first), (came, second)) = life.loads
    assert (first, second) == ("a", "b")
    assert 5270 <= came - 30 <= 5273


def test_the_end_of_a_long_batch_is_part_of_what_a_swap_costs() -> None:
    quick = Life({"a": 10.0, "b": 10.0}, always(a=BACKLOG, b=BACKLOG)).run(20_000)
    slow = Life({"a": 10.0, "b": 10.0}, always(a=BACKLOG, b=BACKLOG), running_seconds=100.0).run(20_000)
    assert slow.swaps() < quick.swaps() / 3


def test_what_cannot_be_loaded_is_tried_again_later_and_later_and_the_other_goes_on() -> None:
    life = Life({"a": 5.0, "b": 5.0}, always(a=BACKLOG, b=BACKLOG), broken=frozenset("b")).run(100_000)
    tries = [at for at, name in life.loads if name == "b"]
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert all(pause >= turns.PAUSE_SECONDS * 2**number for number, pause in enumerate(pauses[:5]))
    assert max(pauses) < turns.LONGEST_PAUSE_SECONDS + 200
    assert life.worked["a"] > 0.95 * life.now
    assert life.turns.told()["b"]["state"] == "unavailable"
    assert life.turns.told()["b"]["reason"] == "no such model"


def test_a_model_that_loads_at_last_is_as_good_as_any() -> None:
    life = Life({"a": 5.0, "b": 5.0}, always(a=BACKLOG, b=BACKLOG), broken=frozenset("b")).run(1000)
    life.broken = frozenset()
    life.run(5000)
    assert life.turns.told()["b"]["reason"] is None
    assert life.worked["b"] > 1000


def test_when_none_can_be_loaded_that_is_said() -> None:
    life = Life({"a": 5.0, "b": 5.0}, always(a=BACKLOG, b=BACKLOG), broken=frozenset("ab"))
    for _ in range(2):
        assert life.turns.can_load
        life._swap(life.turns.choose(life.queues(0), busy=False) or "", busy=False)
    assert not life.turns.can_load
    assert life.turns.choose(life.queues(0), busy=False) is None


def test_what_came_of_each_model_is_counted() -> None:
    life = Life({"a": 30.0, "b": 10.0}, always(a=BACKLOG, b=BACKLOG)).run(1000)
    told = life.turns.told()
    assert {name: (its["loads"], its["swaps"]) for name, its in told.items()} == {"a": (2, 1), "b": (2, 2)}
    assert told["b"]["loading_seconds"] == pytest.approx(20)
    assert told["b"]["seconds"] == pytest.approx(20 + life.worked["b"])
    assert sum(its["seconds"] for its in told.values()) == pytest.approx(life.now)
    assert [told[name]["state"] for name in "ab"] == ["unloaded", "loaded"]
