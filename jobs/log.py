"""Structured logs: one event, one line of JSON on stderr."""

import json
import logging
import sys
import time
from typing import Any

OURS = ("api", "jobs", "worker")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One line for each record: time, level, logger, event, and whatever `extra` carried."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON; a traceback is one escaped field, so an event never takes two lines."""
        event: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        event.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


def setup(level: int = logging.WARNING, path: str | None = None) -> None:
    """Send every log of this process to stderr (or a file) as lines of JSON.

    `level` is for libraries; our own events are shown from INFO on, or from `level` where that is lower.
    """
    handler = logging.FileHandler(path) if path else logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in OURS:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
    logging.captureWarnings(True)
