"""TCP ports of 127.0.0.1 for servers that are started here."""

import fcntl
import logging
import os
import random
import socket
import stat
import tempfile
from functools import cache
from pathlib import Path

from jobs import errors

_logger = logging.getLogger(__name__)
_RANGE = range(10_000, 32_000)
"""Below those that the kernel gives to connections that go out."""
_taken: set[int] = set()


class NoFreePort(errors.LonghaulError):
    """None of the TCP ports {first} to {last} of 127.0.0.1 is free."""


def take() -> int:
    """Return a port that nothing listens on, and that no other call gets while this process lives.

    Between asking for a port and listening on it, another process would be told that it is free: so each one
    locks the byte of its port in a file that all processes of this user share. Raises NoFreePort.
    """
    for port in random.sample(_RANGE, len(_RANGE)):
        if port not in _taken and _lock(port) and is_free(port):
            _taken.add(port)
            return port
    raise NoFreePort(first=_RANGE.start, last=_RANGE.stop - 1)


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _lock(port: int) -> bool:
    locks = _locks()
    try:
        if locks is not None:
            fcntl.lockf(locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except BlockingIOError:
        return False
    return True


@cache
def _locks() -> int | None:
    """Open the file of locks; None where somebody else has put something in its place.

    Then a port is as good as the look at it: another user cannot keep servers from starting.
    """
    path = Path(tempfile.gettempdir(), f"longhaul-ports-{os.getuid()}")
    try:
        # Never closed: that would end all locks of this process.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        _warn(path, error.strerror or str(error))
        return None
    found = os.fstat(file)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid():
        return file
    os.close(file)
    _warn(path, "it is no file of this user")
    return None


def _warn(path: Path, reason: str) -> None:
    facts = {"path": str(path), "reason": reason}
    _logger.warning("ports are not locked: another process may take the same", extra=facts)
