"""What a worker's log tells whoever started it, in either LONGHAUL_LOG_FORMAT."""

import re

from jobs import servers

_METRICS = re.compile(rb'metrics served\b.*?\bhost"?[:=] ?"([^"]*)".*?\bport"?[:=] ?(\d+)')
_STOPPED = re.compile(rb'\bstopped\b.*?\bgiven_back"?[:=] ?(\d+)')


def metrics(worker: servers.Server) -> str | None:
    """Return host:port of its metrics."""
    for line in worker.lines():
        if found := _METRICS.search(line):
            host, port = (part.decode(errors="replace") for part in found.groups())
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return None


def given_back(worker: servers.Server) -> int:
    """Return how many requests it gave back when it stopped; 0 where it does not say."""
    found = [int(match[1]) for line in worker.lines() if (match := _STOPPED.search(line))]
    return found[-1] if found else 0
