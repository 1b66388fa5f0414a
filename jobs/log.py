"""Structured logs: one event, one line of JSON on stderr."""

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType, TracebackType
from typing import Any

from jobs import masking

OURS = ("api", "jobs", "worker")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ALWAYS = ("time", "level", "logger", "event")
_about: ContextVar[Mapping[str, Any]] = ContextVar("about", default=MappingProxyType({}))


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Have each event inside, of whatever module, carry these fields unless it has its own of that name."""
    token = _about.set({**_about.get(), **fields})
    try:
        yield
    finally:
        _about.reset(token)


def _event(record: logging.LogRecord) -> dict[str, Any]:
    """Return what a record tells: when, how bad, who, what, and whatever `about` and `extra` add."""
    event: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": _message(record),
    }
    event.update(_about.get())
    event.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
    return event


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a library whose text and arguments do not fit each other
        return f"{_shown(record.msg)} {_shown(record.args)}"


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _json(value: Any) -> str:
    """Return JSON of whatever is logged: an event that cannot be written is missed when it matters."""
    try:
        return json.dumps(value, default=_shown, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # infinity, keys that are no text, what holds itself
        return json.dumps(_shown(value), ensure_ascii=False)


class JsonLines(logging.Formatter):
    """One line for each record: time, level, logger, event, and whatever `extra` carried; secrets masked."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON; a traceback is one escaped field, so an event never takes two lines."""
        event = _event(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        fields = ", ".join(f"{_json(key)}: {_json(value)}" for key, value in event.items())
        return masking.masked(f"{{{fields}}}")


class TextLines(logging.Formatter):
    """The same for people: time, level, event, logger, fields; a traceback follows in lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        event = _event(record)
        moment, level, logger, text = (event.pop(key) for key in _ALWAYS)
        fields = " ".join(f"{key}={_json(value)}" for key, value in event.items())
        lines = [f"{moment} {level:8} {' '.join(text.splitlines())} [{logger}] {fields}".rstrip()]
        if record.exc_info:
            lines.append(self.formatException(record.exc_info))
        return masking.masked("\n".join(lines))


class Notes(logging.Formatter):
    """What a command warns of, without a time: the event, then its fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text."""
        event = _event(record)
        fields = [f"{key}={_json(value)}" for key, value in event.items() if key not in _ALWAYS]
        return masking.masked(" ".join([f"longhaul: {event['event']}", *fields]))


FORMATS: dict[str, type[logging.Formatter]] = {"json": JsonLines, "text": TextLines}


def setup(level: int = logging.WARNING, path: str | None = None, format: str = "json") -> None:
    """Send every log of this process to stderr (or a file) as lines of JSON, or of text.

    `level` is for libraries; our own events are shown from INFO on, or from `level` where that is lower.
    """
    # Half of a surrogate pair, which a client may send, is written as JSON has it.
    handler = (
        logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
        if path
        else logging.StreamHandler(sys.stderr)
    )
    handler.setFormatter(FORMATS[format]())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = lambda found: _uncaught(found.exc_type, found.exc_value, found.exc_traceback)


def setup_command() -> None:
    """Have a command show warnings with their fields; whoever sets handlers up is not affected."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Notes())


def _uncaught(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Log what nobody caught: a traceback that Python prints itself may show a secret."""
    if error is not None and not isinstance(error, SystemExit | KeyboardInterrupt):
        logging.getLogger(__name__).critical("uncaught", exc_info=(kind, error, trace))
