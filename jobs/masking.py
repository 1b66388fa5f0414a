"""Keep secrets out of what is logged, printed and answered, whoever made the text: libraries quote theirs."""

import json
import os
import re
import threading
from collections.abc import Iterable
from urllib.parse import quote, unquote, urlsplit, urlunsplit

MASK = "***"
VARIABLES = (
    *("LONGHAUL_S3_SECRET_ACCESS_KEY", "LONGHAUL_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
"""Variables of the environment that are secrets."""
HEADER_VARIABLES = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
"""Variables of the form name=value,name=value."""
_SECRET_HEADER = re.compile("auth|key|token|secret|password|cookie", re.IGNORECASE)
URL_VARIABLES = (
    *("LONGHAUL_REDIS_URL", "LONGHAUL_STORE_URL", "LONGHAUL_S3_ENDPOINT_URL", "LONGHAUL_API_URL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"),
    "HF_ENDPOINT",
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
)
"""Variables whose URL may hold a password."""
_SHORTEST = 5
"""What is shorter would be found in words that are no secret."""
_PASSWORD = re.compile(r"://[^:@/]*:(.+)@|[?&]password=([^&]*)")

_lock = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def learn(secrets: Iterable[str | None] = (), urls: Iterable[str | None] = ()) -> None:
    """Mask these, and the passwords in these URLs, from now on."""
    global _pattern
    found = {secret for secret in secrets if secret}
    for url in urls:
        found |= {part for groups in _PASSWORD.findall(url or "") for part in groups if part}
    forms = {form for secret in found for form in _forms(secret) if len(form) >= _SHORTEST}
    with _lock:
        if not forms <= _known:
            _known.update(forms)
            _pattern = re.compile("|".join(map(re.escape, sorted(_known, key=len, reverse=True))))


def learn_environment() -> None:
    """Mask what the environment holds of secrets."""
    learn(map(os.environ.get, VARIABLES), map(os.environ.get, URL_VARIABLES))
    headers = ",".join(os.environ.get(name, "") for name in HEADER_VARIABLES)
    pairs = (header.partition("=") for header in headers.split(","))
    learn(value.strip() for name, _, value in pairs if _SECRET_HEADER.search(name))


def masked(text: str) -> str:
    """Return a text without any secret that is known."""
    return _pattern.sub(MASK, text) if _pattern is not None else text


def _forms(secret: str) -> set[str]:
    """Return how a secret can stand in a text: as it is, in a URL, in JSON, in what Python shows of it."""
    plain = {secret, unquote(secret)}
    quoted = {quote(one, safe="") for one in plain}
    return plain | quoted | {json.dumps(one)[1:-1] for one in plain} | {repr(one)[1:-1] for one in plain}


learn_environment()


_AUTHORITY = re.compile(r"://.*@")


def without_password(url: str) -> str:
    """Return a URL that may be shown."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return _AUTHORITY.sub("://***@", url)
    if "@" not in parts.netloc and "@" in url:  # a password with a slash that is not quoted
        return _AUTHORITY.sub("://***@", url)
    credentials, at, host = parts.netloc.rpartition("@")
    user, colon, _ = credentials.partition(":")
    query = re.sub(r"(?<=password=)[^&]*", "***", parts.query)
    return urlunsplit(parts._replace(netloc=f"{user}{colon}{'***' if colon else ''}{at}{host}", query=query))
