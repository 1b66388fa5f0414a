"""What a recorded run of a scaled fleet is made of, from what the processes log: pure functions.

Events are the lines of JSON that workers and `longhaul autoscale --json` write. All times are unix seconds.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Event = dict[str, Any]
RATE_SECONDS = 2.0
"""Tokens a second are a mean over so long: in half a second there is one step, or none."""
_BECOMES = {"start": "starting", "serving": "serving", "retire": "retiring"}
_ENDS = ("ended", "crashed", "gave_up")
STATES = tuple(_BECOMES.values())
STEPS = {
    "post": "client: POST /v1/batches sent -> answered (the file is there already)",
    "decision": "autoscaler: -> event 'scale' for that worker",
    "process_and_imports": "worker's log: -> 'settings', before which it starts and imports Celery and jobs",
    "model_imports": "worker's log: -> 'model loading'; Celery connects, torch and transformers are imported",
    "weights": "worker's log: -> 'model loaded'",
    "kernels_and_trials": "worker's log: -> 'serving'",
    "plan": "worker's log: -> 'unit done' of the plan; it runs beside the load, so 0 when it was done before",
    "claim": "worker's log: -> 'group claimed'",
    "admission": "metrics.jsonl: -> started_at of the request that has the first token first",
    "prefill": "metrics.jsonl: ttft_seconds of that request",
}
"""The parts of the time to the first token, in order, and what says when each ends."""


def events(text: str) -> list[Event]:
    """Return the events in a log, each with `at`; what is no event, or is not whole yet, is left out."""
    found = []
    for line in text.splitlines():
        try:
            event = json.loads(line)
            found.append(event | {"at": datetime.fromisoformat(event["time"]).timestamp()})
        except (ValueError, TypeError, KeyError):
            continue
    return found


def lives(log: Iterable[Event]) -> list[list[Event]]:
    """Divide a slot's log into the lives of its workers: each says its settings first."""
    found: list[list[Event]] = []
    for event in log:
        if event["event"] == "settings":
            found.append([])
        if found:
            found[-1].append(event)
    return found


@dataclass(frozen=True)
class Place:
    """What an autoscaler has in a slot: when its worker was started, and what it is now."""

    slot: str
    started: float
    state: str


def places(scaler: Iterable[Event]) -> list[Place]:
    """Return the slots with a worker, after these events of an autoscaler."""
    found: dict[str, Place] = {}
    for event in scaler:
        slot, name = event.get("slot"), event["event"]
        if name == "start":
            found[slot] = Place(slot, event["at"], "starting")
        elif name in _BECOMES and slot in found:
            found[slot] = Place(slot, found[slot].started, _BECOMES[name])
        elif name in _ENDS:
            found.pop(slot, None)
    return list(found.values())


def counted(present: Iterable[Place]) -> dict[str, int]:
    """Count workers by what they are."""
    states = [place.state for place in present]
    return {state: states.count(state) for state in STATES}


def rate(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the tokens a second at the last sample; None where nobody could tell the tokens."""
    last = samples[-1]
    if last["output_tokens"] is None:
        return None
    for before in reversed(samples[:-1]):
        passed = last["at"] - before["at"]
        if before["output_tokens"] is not None and passed >= RATE_SECONDS:
            return float(last["output_tokens"] - before["output_tokens"]) / passed
    return 0.0


@dataclass(frozen=True)
class FirstToken:
    """How long a job's first token took from its POST, and what of that each of STEPS took.

    `steps` add up to `seconds`; one that nothing tells of is absent, and the next has its time.
    `plan_seconds`: how long planning itself took; it runs beside the load of the model.
    """

    seconds: float
    steps: dict[str, float] = field(default_factory=dict)
    plan_seconds: float | None = None


def first_token(
    job_id: str,
    posted: float,
    answered: float,
    scaler: Iterable[Event],
    logs: Iterable[Iterable[Event]],
    metrics: Iterable[Mapping[str, Any]],
) -> FirstToken:
    """Divide the time from a job's POST to its first token.

    `logs` are those of the slots, `metrics` the lines of the job's metrics.jsonl. A step that was over
    before the one in front of it, since both ran at once, took 0: the steps are those that were waited for.
    """
    told = [line for line in metrics if line["ttft_seconds"] is not None]
    line = min(told, key=lambda line: line["started_at"] + line["ttft_seconds"])
    all_lives = [life for log in logs for life in lives(log)]
    life = next(life for life in all_lives if _first(life, "serving", worker=line["worker"]))
    before = [event for event in scaler if event["at"] <= life[0]["at"]]
    plan = _first(life, "unit done", unit="plan", job=job_id)
    claims = [event for event in life if event["event"] == "group claimed" and job_id in event["jobs"]]
    moments = {
        "post": answered,
        "decision": _at(_first(reversed(before), "scale")),
        "process_and_imports": life[0]["at"],
        "model_imports": _at(_first(life, "model loading")),
        "weights": _at(_first(life, "model loaded")),
        "kernels_and_trials": _at(_first(life, "serving")),
        "plan": _at(plan),
        "claim": _at(next(iter(claims), None)),
        "admission": line["started_at"],
        "prefill": line["started_at"] + line["ttft_seconds"],
    }
    steps = _divided(posted, moments)
    return FirstToken(sum(steps.values()), steps, plan["seconds"] if plan else None)


def _divided(begin: float, moments: Mapping[str, float | None]) -> dict[str, float]:
    """Return what each took, if none begins before the one in front of it has ended."""
    end = moments["prefill"]
    assert end is not None
    steps, reached = {}, begin
    for name, at in moments.items():
        if at is not None:
            at = min(max(at, reached), end)
            steps[name], reached = at - reached, at
    return steps


def _first(log: Iterable[Event], name: str, **facts: Any) -> Event | None:
    """Return the first event of that name with these facts."""
    for event in log:
        if event["event"] == name and all(event.get(key) == value for key, value in facts.items()):
            return event
    return None


def _at(event: Event | None) -> float | None:
    return None if event is None else float(event["at"])


def columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return samples as columns for a plot; a rate that nobody could tell is NaN: a gap in the line."""
    names = ("at", "queued", "leased", *STATES)
    found = {name: [float(sample[name]) for sample in samples] for name in names}
    rates = (sample["tokens_per_second"] for sample in samples)
    return found | {"rate": [math.nan if one is None else float(one) for one in rates]}
