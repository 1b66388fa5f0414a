"""An HTTP proxy before a real server, that fails in scripted ways."""

import http.client
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Wanted = Callable[[BaseHTTPRequestHandler], bool]


def method(name: str, query: str = "") -> Wanted:
    """Match requests by method and by what stands in their path and query."""
    return lambda request: request.command == name and query in request.path


@dataclass
class Fault:
    """What happens to the next `times` requests that are `wanted`, instead of a plain exchange."""

    wanted: Wanted
    times: int = 1
    status: int | None = None
    """Answer with this status and `code`; the server never hears of the request."""
    code: str = "InternalError"
    loses_answer: bool = False
    """The server does as told, then the connection is closed without an answer."""
    cut_after: int | None = None
    """Close the connection after this many bytes of the body."""
    hang_seconds: float = 0.0
    """Wait before anything else."""
    without_header: str = ""
    """Take this header away, as a server that does not know it would."""
    resets: bool = False
    """Close the connection with a reset; the server never hears of the request."""
    tears: bool = False
    """The server gets half of the request's body; then both connections are closed."""
    forges: bool = False
    """Spoil the signature, as a wrong secret would: the server refuses."""


@dataclass
class Proxy:
    """Forwards to `upstream`; `faults` are tried in order, then the `storm`.

    `seen` has 'METHOD path?query' of each request.
    """

    upstream: str
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    storm: "Storm | None" = None
    seen: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def fault(self, request: BaseHTTPRequestHandler) -> Fault | None:
        with _lock:
            self.seen.append(f"{request.command} {request.path}")
            for fault in self.faults:
                if fault.times > 0 and fault.wanted(request):
                    fault.times -= 1
                    return fault
            return self.storm.strike() if self.storm else None


class Storm:
    """Strikes a `share` of all requests with one of `kinds`; `times` counts how often it did."""

    def __init__(self, seed: int, share: float, kinds: Sequence[Fault]) -> None:
        self.times = 0
        self._random, self._share, self._kinds = random.Random(seed), share, kinds

    def strike(self) -> Fault | None:
        """Return what happens to the next request."""
        if self._random.random() >= self._share:
            return None
        self.times += 1
        fault = self._random.choice(self._kinds)
        return fault if fault.cut_after is None else replace(fault, cut_after=self._random.randrange(2000))


_lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    proxy: Proxy
    ended: threading.Event

    def do_GET(self) -> None:
        try:
            self._exchange()
        except (BrokenPipeError, ConnectionResetError):  # the client gave up first
            self.close_connection = True

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _exchange(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.fault(self)
        if fault and fault.hang_seconds:
            self.ended.wait(fault.hang_seconds)
        if fault and fault.status:
            self._refuse(fault.status, fault.code)
            return
        if fault and (fault.resets or fault.tears):
            if fault.tears:
                self._tear(body)
            self._reset()
            return
        if fault and fault.forges:
            signed = self.headers["Authorization"]
            self.headers.replace_header("Authorization", signed[:-1] + ("1" if signed[-1] == "0" else "0"))
        reply, data = self._forward(body, fault.without_header.lower() if fault else "")
        if fault and fault.loses_answer:
            self.close_connection = True
            return
        self.send_response_only(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = str(len(data)) if self.command != "HEAD" else reply.getheader("Content-Length", "0")
        self.send_header("Content-Length", length)
        self.end_headers()
        if fault and fault.cut_after is not None:
            data = data[: fault.cut_after]
            self.close_connection = True
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        pass

    def _forward(self, body: bytes, without: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = self._begin(without)
        try:
            connection.endheaders(body)
            reply = connection.getresponse()
            return reply, reply.read()
        finally:
            connection.close()

    def _tear(self, body: bytes) -> None:
        connection = self._begin("")
        connection.endheaders(body[: len(body) // 2])
        connection.close()

    def _begin(self, without: str) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc, timeout=30)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("expect", "connection", without):
                connection.putheader(name, value)
        return connection

    def _reset(self) -> None:
        """Close at once, so that the other side sees a reset and no orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())
        self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """Run a proxy before `upstream` (a URL)."""
    proxy = Proxy(upstream)
    ended = threading.Event()
    handler = type("Handler", (_Handler,), {"proxy": proxy, "ended": ended})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    proxy.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
