"""A worker whose clock is wrong by the seconds that stand in the file CLOCK_FILE, and may jump."""

import os
import time
from pathlib import Path

_true_time, _true_time_ns = time.time, time.time_ns
_file = Path(os.environ["CLOCK_FILE"])
_looked, _wrong_by = 0.0, 0.0


def _now() -> float:
    global _looked, _wrong_by
    if time.monotonic() - _looked > 0.05:
        _looked, _wrong_by = time.monotonic(), float(_file.read_text() or 0)
    return _true_time() + _wrong_by


time.time = _now
time.time_ns = lambda: _true_time_ns() + int((_now() - _true_time()) * 1e9)

from worker.celery import app  # noqa: E402  (all that reads a clock reads this one)

__all__ = ["app"]
