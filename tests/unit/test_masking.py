"""A secret that is known is masked in logs, errors and settings, in every form it can have."""

import json
import logging
import sys

import pytest

from jobs import errors, log, masking
from jobs.masking import without_password
from jobs.settings import Settings


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test has taught."""
    monkeypatch.setattr(masking, "_known", set(masking._known))
    monkeypatch.setattr(masking, "_pattern", masking._pattern)


@pytest.mark.parametrize(
    "secret", ["plain-secret", 'with"quote\\s', "with/slash+plus", "späß-geheim", "%2Fquoted%2B"]
)
def test_a_secret_is_masked_in_every_form(secret: str) -> None:
    masking.learn([secret])
    for text in (
        secret,
        json.dumps(secret),
        repr(secret),
        f"x{secret}y",
        json.dumps({"a": secret}, ensure_ascii=False),
    ):
        assert secret not in masking.masked(text)
        assert "***" in masking.masked(text)
    assert secret not in str(errors.SettingsError(f"It is {secret}."))


def test_a_log_line_with_a_traceback_holds_no_secret() -> None:
    masking.learn(urls=["redis://:trace-secret@host:1/0"])
    try:
        raise ValueError("connecting to trace-secret")
    except ValueError:
        record = logging.LogRecord("api", 40, "x", 1, "it is %s", ("trace-secret",), sys.exc_info())
        record.url = "redis://:trace-secret@host"
        line = log.JsonLines().format(record)
    assert "trace-secret" not in line
    assert json.loads(line)["event"] == "it is ***"


def test_settings_teach_their_secrets_and_show_none() -> None:
    made = Settings(
        redis_url="redis://user:secret-a@h/0?password=secret-b",
        s3_secret_access_key="secret-c",
        s3_endpoint_url="http://u:secret-d@h",
        store_url="s3://secret-e:secret-f@b",
    )
    assert "secret-a" not in masking.masked("secret-a secret-b")
    shown = json.dumps(made.shown())
    for secret in ("secret-a", "secret-b", "secret-c", "secret-d", "secret-f"):
        assert secret not in shown
        assert secret not in masking.masked(f"<{secret}>")


@pytest.mark.parametrize(
    "url",
    [
        "redis://:pa/ss-word@host:1/0",
        "redis://:ss-word@[::1/0",
        "rediss://u:ss-word@h",
        "redis://u:x@ss-word@h",
    ],
)
def test_a_url_is_shown_without_its_password(url: str) -> None:
    assert "ss-word" not in without_password(url)


def test_a_short_password_does_not_hide_words() -> None:
    masking.learn(["a"], ["redis://:b@host"])
    assert masking.masked("a b") == "a b"


def test_what_a_collector_is_sent_to_know_us_by_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=longhaul, Authorization=Bearer%20otel-secret-1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://us:otel-secret-2@collector:4318")
    masking.learn_environment()
    assert masking.masked("Bearer otel-secret-1, Bearer%20otel-secret-1") == "***, ***"
    assert masking.masked("http://us:otel-secret-2@collector") == "http://us:***@collector"
    assert masking.masked("longhaul") == "longhaul"
