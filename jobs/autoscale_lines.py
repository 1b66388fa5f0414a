"""What `longhaul autoscale` says: events, and how a person reads them."""

from dataclasses import dataclass
from typing import Any

from jobs import values
from jobs.slots import End, Slot


@dataclass(frozen=True)
class Change:
    """Why a model (None: control alone) is to have more or fewer workers, besides `others` elsewhere."""

    model: str | None
    others: int
    reason: str

    def told(self, have: int, count: int) -> dict[str, Any]:
        """Return the facts of the event."""
        facts = {"model": self.model, "from": have, "to": count}
        return facts | {"others": self.others, "reason": self.reason}


def told(slot: Slot, end: End) -> tuple[str, dict[str, Any]]:
    """Return the event of a worker's end: its name and what is known."""
    facts: dict[str, Any] = {"slot": slot.name, "model": end.model, "status": end.status}
    if not end.status:
        return "ended", facts
    facts |= {"crashes": end.crashes, "tail": end.tail}
    if end.pause_seconds is None:
        return "gave_up", facts
    return "crashed", facts | {"pause_seconds": end.pause_seconds}


def line(event: str, facts: dict[str, Any]) -> str:
    """Return an event as a person reads it."""
    model = facts.get("model") or "control"
    slot = facts.get("slot")
    if event in ("scale", "would_scale"):
        would = "would be " if event == "would_scale" else ""
        besides = f" besides {others} that others started" if (others := facts["others"]) else ""
        to = values.counted(facts["to"], "worker")
        return f"{model}: {would}{facts['from']} -> {to}{besides}: {facts['reason']}"
    if event == "watching":
        return _watching(facts)
    if event == "stopped":
        if not facts["workers"]:
            return "stopped: no worker ran"
        return f"stopped: {values.counted(facts['workers'], 'worker')} ended, " + (
            f"{values.counted(facts['given_back'], 'request')} given back"
        )
    if event == "unit_fails":
        times = f"has failed {facts['failures']} times" if facts["failures"] > 1 else "failed"
        return f"{facts['job']}: its step {facts['unit']!r} {times} and is tried again: {facts['reason']}"
    words = {
        "start": "{slot}: starting a worker of {model} (pid {pid})",
        "serving": "{slot}: serving {model} after {seconds} s{at}",
        "not_loaded": "{model} is not loaded by a worker that should: {reason}",
        "retire": "{slot}: the worker of {model} is to end when what it holds ({held}) is done",
        "hung": "{slot}: the worker of {model} has been {reason} for {seconds} s; it is killed",
        "ended": "{slot}: the worker of {model} has ended",
        "crashed": "{slot}: the worker of {model} ended with exit status {status}; another may start in"
        " {pause_seconds:.0f} s. Its last lines:\n{tail}",
        "gave_up": "{slot}: GIVEN UP for {model}: {crashes} workers in a row ended, the last with exit status"
        " {status}. Its last lines:\n{tail}",
        "redis_away": "Redis does not answer: {reason}",
        "redis_back": "Redis answers again",
        "stopping": "stopping {count}: {reason}",
    }
    at = f"; metrics at {facts['metrics']}" if facts.get("metrics") else ""
    counts = {
        "count": values.counted(facts.get("workers", 0), "worker"),
        "held": values.counted(facts.get("held", 0), "request"),
    }
    more = {"model": model, "slot": slot, "at": at} | counts
    return words[event].format(**facts | more)


def _watching(facts: dict[str, Any]) -> str:
    would = "looking, and starting nothing" if facts["dry_run"] else "scaling"
    models = ", ".join(facts["models"]) or "control alone"
    most = values.counted(facts["max"], "worker")
    line = f"{would}: {models}; {facts['min']} to {most} on {', '.join(facts['slots'])}"
    if facts["not_scaled"]:
        line += f"; not scaled here: {', '.join(facts['not_scaled'])} (LONGHAUL_MODEL)"
    return line
