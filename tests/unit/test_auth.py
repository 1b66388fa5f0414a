"""Who is on this machine, for an API without keys."""

import pytest
from starlette.requests import Request

from api import auth


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("192.168.1.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, own: bool) -> None:
    assert auth.is_loopback(host) is own


@pytest.mark.parametrize(
    ("client", "headers", "own"),
    [
        ("127.0.0.1", {"host": "127.0.0.1:8000"}, True),
        ("127.0.0.1", {"host": "localhost"}, True),
        ("::1", {"host": "[::1]:8000"}, True),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "http://localhost:8000"}, True),
        ("10.0.0.1", {"host": "127.0.0.1:8000"}, False),
        (None, {"host": "127.0.0.1:8000"}, False),
        ("127.0.0.1", {"host": "rebound.example.org:8000"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:8000", "origin": "https://example.org"}, False),
        ("127.0.0.1", {"host": "127.0.0.1:8000", "origin": "null"}, False),
        ("127.0.0.1", {"host": "[:"}, False),
        ("127.0.0.1", {}, False),
    ],
)
def test_a_browser_that_acts_for_another_site_is_not_this_machine(
    client: str | None, headers: dict[str, str], own: bool
) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "headers": raw, "client": (client, 1) if client else None}
    assert auth.from_this_machine(Request(scope)) is own
