"""When a worker that died is started again, and when that would be in vain."""

import time

from jobs import servers

LONGEST_PAUSE_SECONDS = 30.0
_CALM_SECONDS = 600
_MOST_DEATHS_AT_START = 5
_SERVING = (b'"event": "serving"', b"Z info     serving [worker.")
"""What the event looks like in either LONGHAUL_LOG_FORMAT."""


class Deaths:
    """The workers that died of late, and how long to wait before another is started."""

    def __init__(self) -> None:
        self._served: list[float] = []
        self._at_start = 0

    def add(self, worker: servers.Server) -> float:
        """Count a death and return the pause; raise ServerFailed when the worker cannot run at all.

        One that served may have met a poisonous request, and such a request is given up after a few deaths.
        One that never did and says so itself (no such model, say), or was killed as it loaded, again and
        again, will not come to serve.
        """
        now, status = time.monotonic(), worker.process.returncode
        if served(worker):
            self._at_start = 0
            self._served = [death for death in self._served if now - death < _CALM_SECONDS] + [now]
        else:
            self._at_start += 1
            if status > 0 or self._at_start > _MOST_DEATHS_AT_START:
                raise worker.failed(f"ended with exit status {status}")
        deaths = len(self._served) + self._at_start
        return float(min(LONGEST_PAUSE_SECONDS, 2 ** (deaths - 2))) if deaths > 1 else 0.0


def served(worker: servers.Server) -> bool:
    """Tell whether a worker came so far as to take requests."""
    return any(sign in line for line in worker.lines() for sign in _SERVING)


def obituary(worker: servers.Server, pause: float) -> str:
    """Return the line that tells of a death."""
    status = worker.process.returncode
    then = f"another starts in {pause:.0f} s" if pause else "started another"
    why = f" Its last words are in {worker.log}." if status > 0 else ""
    return f"{worker.name} ended with exit status {status}; {then}.{why}"
