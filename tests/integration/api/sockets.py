"""Talk to an API byte by byte, as no proper client does."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from api.errors import ErrorBody
from tests.integration.api.serving import Api


@contextmanager
def connected(api: Api) -> Iterator[socket.socket]:
    """Open a connection."""
    at = urlsplit(api.url)
    with socket.create_connection((at.hostname, at.port), timeout=20) as opened:
        yield opened


def answer(opened: socket.socket) -> tuple[int, bytes]:
    """Read until the server closes; return status (0: nothing was answered) and body."""
    data = b""
    try:
        while chunk := opened.recv(1 << 16):
            data += chunk
    except ConnectionResetError:
        pass
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]) if head else 0), body


def refused(opened: socket.socket, status: int, code: str) -> ErrorBody:
    """Fail unless the answer is this error in the contract's shape, and the connection is closed."""
    found, body = answer(opened)
    assert found == status, body
    error = ErrorBody.model_validate_json(body, strict=True)
    assert error.error.code == code
    return error


def trickle(opened: socket.socket, data: bytes, seconds: float, every: float = 0.05) -> None:
    """Send one byte at a time, for so long or until the server has had enough."""
    end = time.monotonic() + seconds
    opened.setblocking(False)
    for byte in data:
        if time.monotonic() > end:
            break
        try:
            opened.send(bytes([byte]))
            opened.recv(1, socket.MSG_PEEK)
            break
        except BlockingIOError:
            time.sleep(every)
        except OSError:
            break
    opened.settimeout(20)
