"""API keys: the store has a hash alone, and whatever is wrong with a key looks the same."""

import re
from pathlib import Path

import orjson
import pytest

from jobs import errors, keys
from jobs.store_local import LocalStore


@pytest.fixture
def objects(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def known(objects: LocalStore) -> dict[str, keys.KeyRecord | None]:
    return keys.read_all(objects, keys.listed(objects))


def test_a_key_tells_its_tenant(objects: LocalStore) -> None:
    made = {tenant: keys.create(objects, tenant)[1] for tenant in ("one", "two")}
    assert {tenant: keys.tenant_of(known(objects), key) for tenant, key in made.items()} == {
        "one": "one",
        "two": "two",
    }


def test_the_store_never_has_the_key_nor_its_secret(objects: LocalStore, tmp_path: Path) -> None:
    record, key = keys.create(objects, "one", "nightly")
    assert re.fullmatch(rf"lh_{record.id}_[0-9a-f]{{64}}", key)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert record.id.encode() in written
    assert key.rpartition("_")[2].encode() not in written
    facts = orjson.loads(objects.get(f"keys/{record.id}.json"))
    assert set(facts) == {"id", "tenant", "sha256", "name", "created_at", "revoked_at"}


def test_whatever_is_wrong_with_a_key_is_told_in_the_same_words(objects: LocalStore) -> None:
    (one, key), (other, theirs), (gone, revoked) = (keys.create(objects, t) for t in ("one", "two", "one"))
    keys.revoke(objects, gone.id)
    wrong = [
        revoked,
        "",
        "lh_",
        key[:-1],
        key + "0",
        key + "\n",
        key.upper(),
        key[:-1] + ("0" if key[-1] != "0" else "1"),
        key.replace(one.id, other.id),
        theirs.replace(other.id, "0" * 26),
        f"lh_../../{one.id}_{'0' * 64}",
        f"lh_{one.id}_{one.sha256}",
        one.sha256,
        "ключ",
        "lh_" + "٣" * 26 + "_" + "0" * 64,
    ]
    told = set()
    for text in wrong:
        with pytest.raises(errors.Unauthorized) as caught:
            keys.tenant_of(known(objects), text)
        told.add(orjson.dumps(caught.value.body()))
    assert len(told) == 1


def test_revoking_twice_keeps_the_first_time(objects: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = keys.create(objects, "one")
    monkeypatch.setattr(keys.time, "time", lambda: 1000.0)
    assert keys.revoke(objects, record.id).revoked_at == 1000
    monkeypatch.setattr(keys.time, "time", lambda: 2000.0)
    assert keys.revoke(objects, record.id).revoked_at == 1000


@pytest.mark.parametrize("key_id", ["", "0" * 26, "../jobs/x", "0" * 26 + "\n", "I" * 26])
def test_revoking_an_unknown_key_names_it(objects: LocalStore, key_id: str) -> None:
    with pytest.raises(errors.NotFound, match="No such API key"):
        keys.revoke(objects, key_id)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"{}", b'{"id": 1}', b"\xff"])
def test_a_broken_record_opens_nothing_and_shuts_out_nobody_else(objects: LocalStore, data: bytes) -> None:
    broken, key = keys.create(objects, "one")
    _, good = keys.create(objects, "two")
    objects.put(f"keys/{broken.id}.json", data)
    assert keys.tenant_of(known(objects), good) == "two"
    with pytest.raises(errors.Unauthorized):
        keys.tenant_of(known(objects), key)
    assert broken.id in known(objects)
