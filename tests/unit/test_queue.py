"""Names of queues, what may be logged of a URL, and the configuration producers and workers share."""

import pytest

from jobs import errors, queue
from jobs.masking import without_password
from jobs.model_settings import ModelSettings
from jobs.settings import Settings

ECHO = ModelSettings(source="nowhere", engine="echo")


def test_a_queue_name_has_no_comma_and_keeps_slashes_readable() -> None:
    assert queue.model_queue("org/model-1.5@0a1b2c") == "model.org/model-1.5@0a1b2c"
    assert "," not in queue.model_queue("a,b@0a1b2c")
    assert queue.model_queue("a,b@0") != queue.model_queue("a%2Cb@0")


def test_wakes_go_to_their_model_and_units_to_control() -> None:
    assert queue.queue_of(queue.WAKE, ("m@1",)) == "model.m@1"
    assert queue.queue_of(queue.PLAN, ("batch_x",)) == queue.CONTROL


def test_a_worker_consumes_control_and_its_own_model_alone() -> None:
    models = {"a": ECHO, "b": ECHO}
    assert [q.name for q in queue.queues(Settings(models=models, model="none"))] == ["control"]
    fingerprint = ECHO.fingerprint("b")
    assert [q.name for q in queue.queues(Settings(models=models, model="b"))] == [
        "control",
        queue.model_queue(fingerprint),
    ]
    with pytest.raises(errors.SettingsError, match="LONGHAUL_MODEL"):
        queue.queues(Settings(models=models))


def test_a_worker_of_several_models_consumes_the_wakes_of_each() -> None:
    models = {"a": ECHO, "b": ECHO, "c": ECHO}
    names = [q.name for q in queue.queues(Settings(models=models, model="c,a"))]
    assert names == ["control", *(queue.model_queue(ECHO.fingerprint(name)) for name in "ca")]


@pytest.mark.parametrize(
    ("model", "served"),
    [
        ("a", ("a",)),
        ("a, c,a", ("a", "c")),
        ("all", ("a", "c", "b,c")),
        ("b,c", ("b,c",)),
        ("none", ()),
    ],
)
def test_which_models_a_worker_serves(model: str, served: tuple[str, ...]) -> None:
    """A name that has a comma is one model's."""
    assert Settings(models=dict.fromkeys(["a", "c", "b,c"], ECHO), model=model).served == served


@pytest.mark.parametrize("model", ["a,x", "", "a,", "a,none", "a,all"])
def test_a_model_that_is_none_is_named(model: str) -> None:
    with pytest.raises(errors.SettingsError, match=r"is not in LONGHAUL_MODELS \(a\)"):
        _ = Settings(models={"a": ECHO}, model=model).served


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("redis://:geheim@host/1", "redis://:***@host/1"),
        ("rediss://user:geh@eim@host:1/1", "rediss://user:***@host:1/1"),
        ("redis://user@host", "redis://user@host"),
        ("redis://host/0?password=geheim&db=1", "redis://host/0?password=***&db=1"),
        ("unix://:geheim@/run/redis.sock?db=2", "unix://:***@/run/redis.sock?db=2"),
    ],
)
def test_a_password_in_a_url_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


def test_every_key_of_celery_lies_in_the_namespace() -> None:
    options = queue.options(Settings(namespace="blue"), 1)
    assert options["broker_transport_options"]["global_keyprefix"] == "{blue}:celery:"


def test_a_tls_redis_is_verified() -> None:
    assert queue.options(Settings(redis_url="rediss://host/0"), 1)["broker_use_ssl"]["ssl_cert_reqs"] != 0


def test_a_unix_socket_is_translated_for_celery() -> None:
    url = queue.options(Settings(redis_url="unix:///run/redis.sock?db=3"), 1)["broker_url"]
    assert url == "redis+socket:///run/redis.sock?virtual_host=3"
