"""Where a worker's metrics are served: at the first free port of some."""

import errno
import logging
import socket
import threading
from collections.abc import Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, make_wsgi_app

from jobs.metrics import shared

log = logging.getLogger(__name__)
PORTS = 32
"""So many are tried. One setting does for all workers of a machine, and what scrapes them asks at all."""
_PATIENCE_SECONDS = 10


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_port = False  # two would share the port, and each be asked half of the time

    def server_bind(self) -> None:
        """Bind without asking the resolver for a name, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Quiet(WSGIRequestHandler):
    timeout = _PATIENCE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each scrape."""


def registry(models: Iterable[str] = ()) -> CollectorRegistry:
    """Return the registry of a worker of these models, with what is known of any process."""
    made = CollectorRegistry()
    shared.register(made, models)
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    return made


class Endpoint:
    """Serves a registry until it is closed. `port` is None where it is off or no port was free."""

    def __init__(self, registry: CollectorRegistry, host: str, first: int, ports: int = PORTS) -> None:
        self._server = _bound(host, first, min(ports, 65536 - first)) if first else None
        self.port: int | None = None
        if self._server is None:
            return
        self.port = self._server.server_port
        self._server.set_app(make_wsgi_app(registry))
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()
        log.info("metrics served", extra={"host": host, "port": self.port})

    def close(self) -> None:
        """Serve no more; give the port back."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


def _bound(host: str, first: int, ports: int) -> _Server | None:
    """Return a server that listens; None, and a line in the log, where that cannot be."""
    for port in range(first, first + ports):
        try:
            return (_Server6 if ":" in host else _Server)((host, port), _Quiet)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                _say_no(host, first, error.strerror or str(error))
                return None
    _say_no(host, first, f"all of {ports} ports are taken")
    return None


def _say_no(host: str, first: int, reason: str) -> None:
    log.error("metrics are not served", extra={"host": host, "first_port": first, "reason": reason})
