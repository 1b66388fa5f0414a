"""A hub for tests: what it answers to whoever asks for a model's config."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Hub:
    """`answers`: model -> HTTP status and X-Error-Code; others are not found. `asked`: paths and tokens."""

    url: str = ""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@contextmanager
def running() -> Iterator[Hub]:
    """Run a hub on a port of its own."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            hub.asked.append((self.path, self.headers.get("Authorization")))
            model = self.path.split("/resolve/")[0].strip("/")
            status, code = hub.answers.get(model, (404, "RepoNotFound"))
            self.send_response(status)
            self.send_header("ETag", '"e"')
            self.send_header("X-Repo-Commit", "c" * 40)
            self.send_header("Content-Length", "2")
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
