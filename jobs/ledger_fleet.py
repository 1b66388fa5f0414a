"""The ledger's view of workers: what is left for them by model, who is there, and who is to go."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import orjson
import redis

from jobs import ledger_answers as answers
from jobs.ledger_scripts import Argument, Keys, Scripts
from jobs.ledger_types import Failing

SILENT_SECONDS = 60.0
"""A worker that has not reported for so long is not there any more."""
_MOST_DUE = 64
_MOST_TENANTS = 16
_MOST_FAILING = 8
_COUNTS = ("unfed", "tokens", "finished", "prompt", "completion")


@dataclass(frozen=True)
class Due:
    """A job's deadline: seconds until it, and what of the job is not finished."""

    seconds: float
    rows: int
    tokens: int


@dataclass(frozen=True)
class Load:
    """What is left of one model, and what has finished since Redis knows it.

    `queued` requests are held by no worker, and include those not yet in Redis; `leased` ones are held.
    `tokens` are those of prompts that are not finished; of jobs being planned they are not known yet.
    `finished` counts rows, `prompt` and `completion` their tokens: they only grow, until Redis loses all.
    `due` holds the earliest deadlines, the first first.
    """

    queued: int = 0
    leased: int = 0
    tokens: int = 0
    finished: int = 0
    prompt: int = 0
    completion: int = 0
    due: tuple[Due, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """What waits of one model: requests that can be claimed now, since when the oldest does, those to be fed.

    Which is the oldest is looked up among the tenants whose turns are next.
    """

    requests: int = 0
    oldest_seconds: float = 0.0
    unfed: int = 0


@dataclass(frozen=True)
class Present:
    """What a worker last said of itself. `model` is a fingerprint; None serves control alone.

    One that swaps between several `models` says as `model` which of them it has loaded, or is loading.
    `state` is loading, serving, retiring or draining; `held` counts leased requests, `units` units of jobs;
    `idle_seconds` is how long it has had neither; `capacity` is the most requests it runs at once, `running`
    how many it does. Rates are those of the time since its last report; `prefix_hit_ratio` is the part of the
    prompt tokens of its loaded model that were shared, `kv_usage_ratio` that of the room for KV in use: None
    where there is nothing to divide by. `unavailable` are models of several that it could not load, and why.
    """

    name: str
    host: str
    pid: int
    model: str | None
    state: str
    held: int = 0
    units: int = 0
    idle_seconds: float = 0.0
    capacity: int = 1
    age_seconds: float = 0.0
    models: tuple[str, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)
    running: int = 0
    prompt_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    prefix_hit_ratio: float | None = None
    kv_usage_ratio: float | None = None
    version: str | None = None

    def may_run(self, fingerprint: str) -> bool:
        """Whether it takes requests of this model, or is about to."""
        there = self.state in ("loading", "serving") and fingerprint not in self.unavailable
        return there and self.serves([fingerprint])

    def serves(self, fingerprints: Iterable[str]) -> bool:
        """Whether it runs requests of one of these models, now or after a swap."""
        return not {self.model, *self.models}.isdisjoint(fingerprints)


_TOLD = {field.name for field in fields(Present)} - {"name", "age_seconds"}


class Fleet:
    """Workers and their work. Every call reads or writes a few keys, however much is queued."""

    def __init__(self, client: redis.Redis, keys: Keys, scripts: Scripts) -> None:
        self._client, self._keys, self._scripts = client, keys, scripts

    def load(self, fingerprints: Sequence[str]) -> tuple[dict[str, Load], int]:
        """Return the load of these models, and the number of open units of jobs."""
        with self._client.pipeline(transaction=False) as asked:
            asked.hlen(self._keys.name("control"))
            for name in fingerprints:
                asked.hlen(self._keys.name("requests", name))
                asked.zcard(self._keys.name("leases", name))
                asked.hmget(self._keys.name("work"), [f"{what}:{name}" for what in _COUNTS])
            units, *found = asked.execute()
        due = self._due()
        loads = {}
        for place, name in enumerate(fingerprints):
            live, leased, counts = found[3 * place : 3 * place + 3]
            unfed, tokens, finished, prompt, completion = (max(0, int(count or 0)) for count in counts)
            queued = max(0, live + unfed - leased)
            of_model = tuple(due.get(name, ()))
            loads[name] = Load(queued, leased, tokens, finished, prompt, completion, of_model)
        return loads, int(units)

    def begun_and_ended(self) -> int:
        """Return how many jobs wait to be planned or finalized, or are: open units but those that feed."""
        with self._client.pipeline(transaction=False) as asked:
            asked.hlen(self._keys.name("control"))
            asked.scard(self._keys.name("feeding"))
            units, feeding = asked.execute()
        return max(0, int(units) - int(feeding))

    def failing(self) -> list[Failing]:
        """Return some of the units that failed when they ran last."""
        found: Any = self._client.hrandfield(self._keys.name("unit_failures"), _MOST_FAILING, withvalues=True)
        pairs = zip(found[::2], found[1::2], strict=True)
        return [answers.failing(answers.text(unit), told) for unit, told in pairs]

    def waiting(self, fingerprints: Iterable[str]) -> dict[str, Waiting]:
        """Return what waits of these models."""
        found = {}
        for name in fingerprints:
            keys = self._keys.of(model=name)
            count, unfed, ms = map(int, self._scripts.run("waiting", keys, "", name, _MOST_TENANTS))
            found[name] = Waiting(count, max(0, ms) / 1000, unfed)
        return found

    def pace(self, fingerprint: str) -> tuple[float | None, float | None]:
        """Return the tokens a second of a busy worker and its start-up in seconds, as noted last."""
        names = [f"rate:{fingerprint}", f"startup:{fingerprint}"]
        found: Any = self._client.hmget(self._keys.name("work"), names)
        rate, startup = (float(value) if value else None for value in found)
        return rate, startup

    def note_pace(self, fingerprint: str, rate: float, startup_seconds: float) -> None:
        """Note what an autoscaler has learned, for the next one to begin with."""
        facts: Any = {f"rate:{fingerprint}": rate, f"startup:{fingerprint}": startup_seconds}
        self._client.hset(self._keys.name("work"), mapping=facts)

    def take_turn(self, fingerprint: str, autoscaler: str, seconds: float) -> bool:
        """Tell whether this autoscaler may change the workers of a model; for so long no other may then.

        Workers that swap take turns in the same way: "load:<fingerprint>" is whose it is to load a model.
        """
        return bool(self._run("turn", fingerprint, autoscaler, int(seconds * 1000)))

    def _due(self) -> dict[str, list[Due]]:
        due: dict[str, list[Due]] = {}
        for ms, fingerprint, rows, tokens in self._run("due", _MOST_DUE):
            due.setdefault(answers.text(fingerprint), []).append(Due(int(ms) / 1000, int(rows), int(tokens)))
        return due

    def report(self, present: Present) -> bool:
        """Say that a worker is there; tell whether it is to retire."""
        facts = asdict(present)
        del facts["name"], facts["age_seconds"]
        keep = int(SILENT_SECONDS * 1000)
        return bool(self._run("report", present.name, orjson.dumps(facts), keep))

    def leave(self, name: str) -> None:
        """Say that a worker has ended."""
        self._run("leave", name)

    def retire(self, names: Iterable[str]) -> None:
        """Ask workers to claim no more and to end once they hold nothing; they hear it when they report."""
        self._run("retire", *names)

    def present(self) -> list[Present]:
        """Return the workers that reported of late, of all machines."""
        found = []
        for name, ms, facts in self._run("fleet", int(SILENT_SECONDS * 1000)):
            # What a newer worker tells besides is not for this process.
            told = {name: value for name, value in orjson.loads(facts).items() if name in _TOLD}
            told["models"] = tuple(told.get("models", ()))
            found.append(Present(answers.text(name), age_seconds=int(ms) / 1000, **told))
        return found

    def _run(self, script: str, *args: Argument) -> Any:
        return self._scripts.run(script, self._keys.of(), "", *args)
