"""What `longhaul autoscale` says: events, and how a person reads them."""

from typing import Any

from jobs.slots import End, Slot


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
        return f"{model}: {would}{facts['from']} -> {facts['to']} workers: {facts['reason']}"
    words = {
        "start": "{slot}: starting a worker of {model} (pid {pid})",
        "serving": "{slot}: serving {model} after {seconds} s",
        "retire": "{slot}: the worker of {model} is to end when what it holds ({held} requests) is done",
        "hung": "{slot}: the worker of {model} has been {reason} for {seconds} s; it is killed",
        "ended": "{slot}: the worker of {model} has ended",
        "crashed": "{slot}: the worker of {model} ended with exit status {status}; another may start in"
        " {pause_seconds:.0f} s. Its last lines:\n{tail}",
        "gave_up": "{slot}: GIVEN UP for {model}: {crashes} workers in a row ended, the last with exit status"
        " {status}. Its last lines:\n{tail}",
        "redis_away": "Redis does not answer: {reason}",
        "redis_back": "Redis answers again",
        "stopping": "stopping {workers} workers: {reason}",
    }
    return words[event].format(**facts | {"model": model, "slot": slot})
