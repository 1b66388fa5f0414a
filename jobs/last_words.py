"""Why a process ended, as its log has it: what a person reads of lines that are for programs."""

import json
from collections.abc import Sequence

_OURS = "longhaul: "
"""How a process of ours begins the line in which it says why it ends."""
_BAD = frozenset({"error", "critical"})
_LINES = 5


def of(output: str) -> str:
    """Return the reason that a process of ours gave at its end, else the last error, else the last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    given = [line.removeprefix(_OURS) for line in lines if line.startswith(_OURS)]
    if given:
        return given[-1]
    events = [event for line in lines if (event := _event(line))]
    bad = [event for event in events if event.get("level") in _BAD]
    if bad:
        return _told(bad[-1])
    return _joined([_told(event) if (event := _event(line)) else line.strip() for line in lines[-_LINES:]])


def _joined(lines: Sequence[str]) -> str:
    return "\n  ".join(["", *lines]) if len(lines) > 1 else "".join(lines) or "it said nothing"


def _event(line: str) -> dict[str, object] | None:
    try:
        found = json.loads(line) if line.startswith("{") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def _told(event: dict[str, object]) -> str:
    """Return an event's words: what happened, and why, be it a field or the last line of a traceback."""
    trace = str(event.get("exception") or "").strip()
    why = event.get("reason") or event.get("error") or trace.split("\n")[-1]
    return f"{event['event']}: {why}" if why else str(event["event"])
