"""`longhaul doctor`: what is wrong, what cannot be checked; it neither hangs nor tells secrets."""

import importlib.util
import os
import socket
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import (
    cli,
    client,
    commands,
    doctor_findings,
    doctor_redis,
    doctor_server,
    doctor_settings,
    doctor_store,
    errors,
    masking,
    store_faults,
)
from jobs.doctor_findings import Area, Finding, Look
from jobs.settings import Settings
from jobs.store_local import LocalStore

look = Look("x")


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with the client alone, in an empty directory."""
    find = importlib.util.find_spec
    absent = ("torch", "transformers")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in absent else find(name, *more)
    )
    for name in [name for name in os.environ if name.startswith("LONGHAUL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def doctor(*options: str) -> Result:
    return CliRunner().invoke(cli.main, ["doctor", *options])


def findings(result: Result) -> dict[tuple[str, str], dict[str, str]]:
    rows = [orjson.loads(row) for row in result.stdout.splitlines()]
    return {(row["area"], row["name"]): row for row in rows}


def test_a_laptop_without_servers_and_extras_is_told_what_was_not_checked(laptop: Path) -> None:
    result = doctor("--json")
    found = findings(result)
    assert result.exit_code == (1 if any(row["state"] == "wrong" for row in found.values()) else 0)
    assert found["store", "access"]["state"] == "unchecked"
    assert found["machine", "worker"]["state"] == "unchecked"
    assert "pip install 'longhaul[worker]'" in found["machine", "worker"]["advice"]
    assert not list(laptop.iterdir()), "nothing is made"


def test_all_that_is_not_fine_says_what_to_do(laptop: Path) -> None:
    for row in findings(doctor("--json")).values():
        assert row["state"] == "ok" or row["advice"], row


def test_what_is_wrong_makes_the_exit_code_1_and_is_told_with_advice(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("LONGHAUL_REDIS_URL", f"redis://me:hush-hush@127.0.0.1:{free_port}/0")
    monkeypatch.setenv("LONGHAUL_STORE_URL", f"file://{laptop}/store")
    result = doctor()
    assert result.exit_code == 1
    assert "WRONG        redis, reachable: " in result.output
    assert "-> Start it, or correct LONGHAUL_REDIS_URL" in result.output
    assert "ok           store, writes of what is new" in result.output
    assert "hush-hush" not in result.output
    assert "\x1b" not in result.output
    assert not list((laptop / "store").glob("doctor/*"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("LONGHAUL_REDS_URL", "x"), ("LONGHAUL_LEASE_SECONDS", "-1"), ("LONGHAUL_MODELS", "{")],
)
def test_settings_that_cannot_be_read_are_named_and_the_rest_is_looked_at_without_them(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setenv("LONGHAUL_STORE_URL", f"file://{laptop}/store")
    result = doctor("--json")
    found = findings(result)
    assert result.exit_code == 1
    assert variable in found["settings", "readable"]["said"]
    assert f"unset {variable} " in found["settings", "readable"]["advice"]
    assert ("server", "reachable") in found
    assert ("redis", "reachable") in found
    assert found["store", "access"]["state"] == "ok"
    assert os.environ[variable] == value, "it is taken away for the check alone"


def test_each_of_several_settings_that_cannot_be_read_is_told_once(
    laptop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["LONGHAUL_REDS_URL", "LONGHAUL_LEASE_SECONDS", "LONGHAUL_DRAIN_SECONDS"]
    for name in names:
        monkeypatch.setenv(name, "-1")
    told = [row["said"] for row in map(orjson.loads, doctor("--json").stdout.splitlines())]
    assert [sum(said.startswith(name) for said in told) for name in names] == [1, 1, 1]


def test_a_running_stack_lends_its_settings_for_as_long_as_that_takes(laptop: Path) -> None:
    (laptop / ".longhaul").mkdir()
    store = laptop / "of the stack"
    (laptop / ".longhaul" / "environment").write_text(f"LONGHAUL_STORE_URL='file://{store}'\n")
    found = findings(doctor("--json"))
    assert ".longhaul/environment" in found["settings", "source"]["said"]
    assert str(store) in found["store", "access"]["said"]
    assert "LONGHAUL_STORE_URL" not in os.environ
    assert "no 'longhaul up' runs there" in doctor("--dir", "elsewhere").output


@pytest.mark.parametrize("text", ["LONGHAUL_MODEL='a", "export LONGHAUL_MODEL=a", "=5", "\udcff"])
def test_settings_of_a_stack_that_are_broken_are_told(laptop: Path, text: str) -> None:
    (laptop / "environment").write_bytes(text.encode(errors="surrogateescape"))
    result = doctor("--json", "--dir", str(laptop))
    assert "is not what 'longhaul up' writes" in result.stderr


def test_passwords_of_the_servers_url_are_masked(laptop: Path, free_port: int) -> None:
    url = f"http://me:open-sesame@127.0.0.1:{free_port}"
    said = doctor("--json", "--url", url).output
    said += CliRunner().invoke(cli.main, ["doctor", "--url", url.replace("http:", "ftp:")]).output
    assert f"127.0.0.1:{free_port}" in said
    assert "open-sesame" not in said
    assert "open-sesame" not in commands.Session(url, None, False).shown_url


def test_a_server_that_was_named_and_is_not_there_is_wrong(laptop: Path, free_port: int) -> None:
    result = doctor("--json", "--url", f"http://127.0.0.1:{free_port}")
    assert findings(result)["server", "reachable"]["state"] == "wrong"
    assert result.exit_code == 1


def test_a_redis_that_says_nothing_is_given_up_in_time(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("LONGHAUL_REDIS_URL", f"redis://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(doctor_redis, "_SECONDS", 0.2)
        began = time.monotonic()
        found = findings(doctor("--json"))
    assert found["redis", "reachable"]["state"] == "wrong"
    assert "takes connections, and does not answer" in found["redis", "reachable"]["said"]
    assert "It hangs" in found["redis", "reachable"]["advice"]
    assert time.monotonic() - began < 20


def _hangs() -> Iterator[Finding]:
    yield look.ok("first", "there")
    time.sleep(60)


def _raises(error: Exception) -> Callable[[], Iterator[Finding]]:
    def check() -> Iterator[Finding]:
        yield look.ok("first", "there")
        raise error

    return check


def test_what_hangs_is_left_behind_and_the_others_are_told_in_their_order() -> None:
    areas = [Area("slow", _hangs, 0.2), Area("next", lambda: [look.ok("second", "too")], 5)]
    began = time.monotonic()
    states = [(found.name, found.state) for found in doctor_findings.run(areas)]
    assert states == [("first", "ok"), ("time", "wrong"), ("second", "ok")]
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("error", "state"),
    [(errors.SettingsError("no good"), "wrong"), (ZeroDivisionError("no good"), "unchecked")],
)
def test_a_check_that_fails_is_told_after_what_it_found(error: Exception, state: str) -> None:
    first, last = doctor_findings.run([Area("a", _raises(error), 5)])
    assert (first.name, last.state) == ("first", state)
    assert "no good" in last.said


def test_secrets_of_libraries_are_masked() -> None:
    masking.learn(["very-secret-word"])
    assert "very-secret-word" not in orjson.dumps(look.ok("n", "a very-secret-word").json()).decode()


def test_bytes_that_are_no_text_are_shown_all_the_same() -> None:
    assert orjson.dumps(look.ok("place", "a\udcff").json()).count(b"a?") == 1


GOOD = {
    "redis_version": "7.4.1",
    "role": "master",
    "cluster_enabled": 0,
    "maxmemory_policy": "noeviction",
    "maxmemory": 10**9,
    "used_memory": 10**8,
    "total_system_memory": 10**10,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok",
}


def test_a_redis_as_it_should_be_is_ok() -> None:
    assert {found.state for found in doctor_redis.facts(GOOD, 10**8)} == {"ok"}


@pytest.mark.parametrize(
    ("changed", "name", "state"),
    [
        ({"redis_version": "5.0.3"}, "version", "wrong"),
        ({"cluster_enabled": 1}, "kind", "wrong"),
        ({"role": "slave"}, "kind", "wrong"),
        ({"maxmemory_policy": "allkeys-lru"}, "eviction", "wrong"),
        ({"maxmemory_policy": ""}, "eviction", "unchecked"),
        ({"aof_enabled": 0}, "persistence", "warning"),
        ({"aof_last_write_status": "err"}, "persistence", "wrong"),
        ({"rdb_last_bgsave_status": "err"}, "persistence", "wrong"),
        ({"used_memory": 9 * 10**8}, "memory", "warning"),
        ({"maxmemory": 1.5 * 10**8, "used_memory": 1}, "memory", "warning"),
        ({"maxmemory": 0, "used_memory": 9 * 10**9}, "memory", "warning"),
    ],
)
def test_a_redis_that_is_not_is_told(changed: dict[str, Any], name: str, state: str) -> None:
    bad = [found for found in doctor_redis.facts(GOOD | changed, 10**8) if found.state != "ok"]
    assert [(found.name, found.state) for found in bad] == [(name, state)]
    assert all(found.advice for found in bad)


@pytest.mark.parametrize(("seconds", "state"), [(0.3, "ok"), (-1.9, "ok"), (3, "warning"), (-60, "warning")])
def test_clocks_may_be_apart_by_a_little(seconds: float, state: str) -> None:
    assert doctor_redis.skew(look, seconds).state == state


@pytest.mark.parametrize(
    ("changed", "name", "state"),
    [
        ({"heartbeat_seconds": 30}, "leases", "wrong"),
        ({"heartbeat_seconds": 12}, "leases", "warning"),
        ({"reap_seconds": 31}, "reaper", "warning"),
        ({"drain_seconds": 60}, "ending", "warning"),
        ({"step_timeout_seconds": 10}, "steps", "warning"),
        ({"max_line_bytes": 10**9}, "limits", "warning"),
        ({"s3_access_key_id": "a"}, "store keys", "wrong"),
        ({"model": "other"}, "models", "wrong"),
        ({"models": {"a": {"source": "a"}, "b": {"source": "b"}}}, "models", "warning"),
        ({"scratch_dir": "/nope"}, "scratch", "wrong"),
    ],
)
def test_settings_that_do_not_fit_together_are_told(
    laptop: Path, changed: dict[str, Any], name: str, state: str
) -> None:
    good = {"models": {"m": {"source": "s"}}, "scratch_dir": laptop}
    assert {found.state for found in doctor_settings.check(Settings(**good))} == {"ok"}
    found = [one for one in doctor_settings.check(Settings(**(good | changed))) if one.state != "ok"]
    assert [(one.name, one.state) for one in found] == [(name, state)]
    assert all(one.advice for one in found)


@pytest.mark.parametrize(
    ("first", "second", "state"),
    [(200, 412, "ok"), (200, 409, "ok"), (200, 200, "warning"), (501, 501, "warning"), (400, 400, "warning")],
)
def test_conditional_writes_are_those_of_which_the_second_is_refused(
    first: int, second: int, state: str
) -> None:
    assert doctor_store.conditional(first, second).state == state


def _server(*answers: httpx.Response | Exception, key: str | None = None) -> list[Finding]:
    left = iter(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        one = next(left)
        if isinstance(one, Exception):
            raise one
        return one

    api = client.Client("http://x", key, transport=httpx.MockTransport(answer), patience_seconds=0)
    return list(doctor_server.check(api, True, key))


MODELS = {"data": [{"id": "smol"}]}
WORKER = {
    "id": "w",
    "model": "smol",
    "models": ["smol"],
    "state": "serving",
    "age_seconds": 1,
    "version": metadata.version("longhaul"),
}


@pytest.mark.parametrize(
    ("workers", "state"),
    [
        ([WORKER], []),
        ([], ["workers"]),
        ([WORKER | {"model": "other", "models": ["other"]}], ["models"]),
        ([WORKER | {"age_seconds": 50}], ["workers"]),
        ([WORKER | {"version": "0.0.1"}], ["workers"]),
        ([WORKER | {"model": None, "models": []}], ["models"]),
    ],
)
def test_workers_are_there_for_each_model_and_of_this_version(
    workers: list[dict[str, Any]], state: list[str]
) -> None:
    told = {"api_version": WORKER["version"], "data": workers}
    found = _server(httpx.Response(200, json=MODELS), httpx.Response(200, json=told))
    assert [one.name for one in found if one.state != "ok"] == state


def test_another_version_of_the_server_is_told() -> None:
    told = {"api_version": "9.9", "data": [WORKER]}
    found = _server(httpx.Response(200, json=MODELS), httpx.Response(200, json=told))
    assert [(one.name, one.state) for one in found if one.state != "ok"] == [("version", "warning")]


@pytest.mark.parametrize(
    ("answer", "name", "words"),
    [
        (httpx.Response(401, json={"error": {"message": "No."}}), "key", "longhaul keys create TENANT"),
        (httpx.Response(404, text="nginx"), "reachable", "check --url"),
        (httpx.Response(503, json={"error": {"message": "away", "code": "unavailable"}}), "ready", "Redis"),
        (httpx.Response(200, text="<html>"), "reachable", "check --url"),
    ],
)
def test_a_server_that_refuses_is_told_with_what_to_do(answer: httpx.Response, name: str, words: str) -> None:
    (found,) = _server(answer)
    assert (found.name, found.state) == (name, "wrong")
    assert words in found.advice


@pytest.mark.parametrize(("key", "words"), [(None, "asks for a key"), ("lh_x", "does not know this key")])
def test_a_key_that_opens_nothing_is_told_from_none_with_one_advice(key: str | None, words: str) -> None:
    (found,) = _server(httpx.Response(401, json={"error": {"message": "No."}}), key=key)
    assert words in found.said
    assert "LONGHAUL_API_KEY" not in found.said
    assert found.advice.count("LONGHAUL_API_KEY") == 1


@pytest.mark.parametrize(
    ("second", "state", "words"),
    [
        (httpx.Response(503, json={"error": {"message": "away", "code": "unavailable"}}), "wrong", "Redis"),
        (httpx.ReadTimeout("timed out"), "wrong", "hangs"),
        (httpx.Response(404, json={"error": {"message": "No such path"}}), "unchecked", "older"),
        (httpx.Response(500, json={"error": {"message": "oh"}}), "unchecked", "See the message"),
    ],
)
def test_a_server_whose_redis_hangs_is_not_called_old(
    second: httpx.Response | Exception, state: str, words: str
) -> None:
    first, last = _server(httpx.Response(200, json=MODELS), second)
    assert (first.state, last.state) == ("ok", state)
    assert words in last.advice


def test_the_server_of_a_running_stack_is_looked_for_where_it_is(laptop: Path, free_port: int) -> None:
    (laptop / ".longhaul").mkdir()
    url = f"http://127.0.0.1:{free_port}"
    (laptop / ".longhaul" / "environment").write_text(f"LONGHAUL_API_URL={url}\n")
    found = findings(doctor("--json"))["server", "reachable"]
    assert url in found["said"]
    assert found["state"] == "wrong", "it says that one runs there"
    given = findings(doctor("--json", "--url", "http://127.0.0.1:1"))["server", "reachable"]
    assert "http://127.0.0.1:1:" in given["said"]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("the access key id is not known", "LONGHAUL_S3_ACCESS_KEY_ID"),
        ("the secret access key is wrong", "LONGHAUL_S3_SECRET_ACCESS_KEY"),
        ("no access key is set", "Set LONGHAUL_S3_ACCESS_KEY_ID"),
        ("access denied", "Let these keys"),
        ("bucket 'b' does not exist", "Make the bucket"),
        ("no answer from http://x: Connection refused", "Start it"),
        ("Permission denied (doctor/1)", "Let this user write there"),
        ("No space left on device (doctor/1)", "Make room"),
    ],
)
def test_each_fault_of_a_store_has_its_own_advice(
    laptop: Path, monkeypatch: pytest.MonkeyPatch, reason: str, words: str
) -> None:
    monkeypatch.setenv("LONGHAUL_STORE_URL", f"file://{laptop}")
    fails = errors.StoreUnreachable(url="s3://b", reason=reason)
    for operation in ("check", "put"):
        faulty = store_faults.FaultyStore(LocalStore(laptop), {operation: store_faults.FailTimes(1, fails)})
        monkeypatch.setattr(doctor_store.store, "open_store", lambda *_, faulty=faulty, **__: faulty)
        found = next(iter(doctor_store.check(Settings.load())))
        assert (found.state, words in found.advice) == ("wrong", True), found
        assert "Check LONGHAUL" not in found.said
