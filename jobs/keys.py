"""API keys: each is for a tenant, and the store keeps a hash of it, never the key."""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from jobs import errors, ids
from jobs.records import Record
from jobs.store import ObjectStore

log = logging.getLogger(__name__)

PREFIX = "keys/"
DEFAULT_TENANT = "default"
"""Who asks while there is no key."""
_READERS = 16
_ID = r"[0-9a-hjkmnp-tv-z]{26}"
_NAME = re.compile(rf"{PREFIX}({_ID})\.(json|revoked)")
_KEY = re.compile(rf"lh_({_ID})_[0-9a-f]{{64}}")
_NOBODYS = "0" * 64


@dataclass(frozen=True)
class KeyRecord(Record):
    """What is known of a key; times in unix seconds.

    `keys/<id>.json` is never changed, and `keys/<id>.revoked` holds when it was revoked: so a server that
    knows the records learns all news from the names alone.
    """

    id: str
    tenant: str
    sha256: str
    name: str
    created_at: int
    revoked_at: int | None = None


def create(store: ObjectStore, tenant: str, name: str = "") -> tuple[KeyRecord, str]:
    """Make a key of a tenant; return its record and the key, which is written down nowhere."""
    key_id = ids.ulid()
    key = f"lh_{key_id}_{secrets.token_hex(32)}"
    record = KeyRecord(key_id, tenant, _hash(key), name, int(time.time()))
    store.put(_path(key_id), record.to_json())
    return record, key


def revoke(store: ObjectStore, key_id: str) -> KeyRecord:
    """Make a key worthless for good and return its record; raise NotFound. Again changes nothing."""
    record = read(store, key_id) if re.fullmatch(_ID, key_id) else None
    if record is None:
        raise errors.NotFound(what="API key", id=key_id[:100])
    if record.revoked_at is None:
        store.put_new(_path(key_id, "revoked"), str(int(time.time())).encode())
    return read(store, key_id) or record


def listed(store: ObjectStore) -> dict[str, bool]:
    """Return the ids of all keys ever made, oldest first, and whether they are revoked."""
    found = [match for item in store.list(PREFIX) if (match := _NAME.fullmatch(item.key))]
    revoked = {match[1] for match in found if match[2] == "revoked"}
    return {key_id: key_id in revoked for key_id in sorted({match[1] for match in found})}


def read_all(store: ObjectStore, wanted: Mapping[str, bool]) -> dict[str, KeyRecord | None]:
    """Return the records of these keys (id -> is it revoked?).

    One that cannot be understood is None: a key that opens nothing.
    """
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda item: read(store, *item), wanted.items())
        return dict(zip(wanted, found, strict=True))


def read(store: ObjectStore, key_id: str, revoked: bool = True) -> KeyRecord | None:
    """Return the record of a key, or None if there is none that can be understood.

    `revoked` False: it is known that it is not.
    """
    try:
        record = KeyRecord.from_json(store.get(_path(key_id)))
        return replace(record, revoked_at=_revoked_at(store, key_id)) if revoked else record
    except errors.NotFound:
        return None
    except (ValueError, TypeError):
        log.error("the record of an API key is broken", extra={"key": _path(key_id)})
        return None


def _revoked_at(store: ObjectStore, key_id: str) -> int | None:
    try:
        return int(store.get(_path(key_id, "revoked")))
    except errors.NotFound:
        return None


def tenant_of(known: Mapping[str, KeyRecord | None], key: str) -> str:
    """Return the tenant of a key; raise Unauthorized, the same after the same work whatever is wrong."""
    match = _KEY.fullmatch(key)
    record = known.get(match[1]) if match else None
    right = hmac.compare_digest(_hash(key), record.sha256 if record else _NOBODYS)
    if record is None or record.revoked_at is not None or not right:
        raise errors.Unauthorized()
    return record.tenant


def _hash(key: str) -> str:
    # A fast hash will do: unlike a password, 256 random bits cannot be guessed, however fast one tries.
    return hashlib.sha256(key.encode()).hexdigest()


def _path(key_id: str, kind: str = "json") -> str:
    return f"{PREFIX}{key_id}.{kind}"
