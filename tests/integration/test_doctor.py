"""`longhaul doctor` on real servers, and the process that looks at models and devices."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from jobs import doctor_machine, doctor_redis, doctor_store, embedded, ids, store
from jobs.doctor_findings import Finding
from jobs.settings import Settings
from worker.engine import tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def s3(seaweedfs: embedded.SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Settings:
    url = f"s3://{seaweedfs.bucket}/doctor/{ids.ulid()}"
    monkeypatch.setenv("LONGHAUL_STORE_URL", url)
    return Settings(
        store_url=url,
        s3_endpoint_url=seaweedfs.endpoint_url,
        s3_access_key_id=seaweedfs.access_key,
        s3_secret_access_key=seaweedfs.secret_key,
    )


def told(found: Iterator[Finding]) -> dict[str, str]:
    return {one.name: one.state for one in found}


def test_a_redis_of_ours_is_as_it_should_be(redis_url: str) -> None:
    settings = Settings(redis_url=redis_url)
    names = ("reachable", "version", "eviction", "persistence", "memory", "clock", "writes")
    assert told(doctor_redis.check(settings)) == dict.fromkeys(names, "ok")
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0, "nothing is left behind"
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            assert told(doctor_redis.check(settings))["eviction"] == "wrong"
        finally:
            client.config_set("maxmemory-policy", "noeviction")


def test_a_redis_that_wants_a_password_says_so(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("requirepass", "let-me-in")
        try:
            (found,) = doctor_redis.check(Settings(redis_url=redis_url))
        finally:
            client.config_set("requirepass", "")
    assert found.state == "wrong"
    assert "password" in found.advice


def test_a_store_of_ours_is_as_it_should_be_and_nothing_is_left_in_it(s3: Settings) -> None:
    names = ("access", "conditional writes", "clock")
    assert told(doctor_store.check(s3)) == dict.fromkeys(names, "ok")
    assert list(store.open_store(s3).list("")) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"s3_secret_access_key": "wrong-one"}, "access key is wrong"),
        ({"store_url": "s3://no-such-bucket"}, "Make the bucket"),
    ],
)
def test_a_store_that_cannot_be_used_says_why(s3: Settings, changed: dict[str, str], words: str) -> None:
    settings = Settings.model_validate(s3.model_dump() | changed)
    (found,) = doctor_store.check(settings)
    assert found.state == "wrong"
    assert words in f"{found.said} {found.advice}"


@pytest.mark.timeout(180)
def test_models_and_devices_are_looked_at_in_a_process_of_their_own(tmp_path: Path) -> None:
    model = tiny.tiny_model(tmp_path / "tiny")
    served = {"LONGHAUL_MODELS": f'{{"tiny": {{"source": "{model}"}}}}', "PYTHONPATH": str(ROOT)}
    found = list(doctor_machine.check(150, served))
    states = {(one.area, one.name): one.state for one in found}
    assert states["device", "torch"] == "ok"
    assert states["model tiny", "memory"] == "ok"
    assert "machine" not in {one.area for one in found}


def test_a_process_that_hangs_is_killed_and_what_it_found_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import json, time\n"
        "print(json.dumps(dict(area='a', name='n', state='ok', said='s', advice='')), flush=True)\n"
        "time.sleep(100)\n"
    )
    monkeypatch.setattr(doctor_machine, "_MODULE", "slow")
    began = time.monotonic()
    first, last = doctor_machine.check(3, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert (first.area, last.state) == ("a", "wrong")
    assert "killed" in last.said
    assert time.monotonic() - began < 30


@pytest.mark.long
def test_the_command_ends_by_itself_where_nothing_answers(tmp_path: Path, free_port: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from jobs.entry import main; main()", "doctor", "--json"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
        | {"LONGHAUL_REDIS_URL": f"redis://127.0.0.1:{free_port}", "LONGHAUL_MODELS": "{}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == ""
