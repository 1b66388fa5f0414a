"""The files of a tenant: records beside their bytes in the store."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, cast

from jobs import errors, ids, lines
from jobs.creation import refusal
from jobs.memo import Memo
from jobs.records import FileRecord
from jobs.store import ObjectStore

PURPOSES = ("batch", "assistants", "fine-tune", "vision", "user_data", "evals")
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_READERS = 16
_REMEMBERED = 20_000


class Files:
    """Add, find, list and delete file records. A file that has expired is treated as absent."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self._clock = clock
        self._remembered = Memo(self._read, _REMEMBERED)

    def add(
        self, tenant: str, filename: str, purpose: str, data: BinaryIO, expires_seconds: int | None = None
    ) -> FileRecord:
        """Store the bytes, then the record that makes them a file."""
        file_id = ids.file_id()
        created_at = int(made_at(file_id))
        counted = lines.Counting(data)
        size = self.store.put(f"files/{file_id}", cast(BinaryIO, counted))
        record = FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            bytes=size,
            created_at=created_at,
            key=f"files/{file_id}",
            expires_at=created_at + expires_seconds if expires_seconds else None,
            lines=counted.lines,
        )
        write_record(self.store, record)
        return record

    def get(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record; raise NotFound for an absent, expired or foreign one."""
        record = None
        if file_id.startswith("file") and ids.is_id(file_id):
            record = self._read(record_key(tenant, file_id))
        if record is None or self._expired(record):
            raise errors.NotFound(what="file", id=file_id[:100])
        return record

    def newest(self, tenant: str, purpose: str | None = None) -> list[FileRecord]:
        """Return the tenant's unexpired files, newest first."""
        keys = [found.key for found in self.store.list(f"file-records/{tenant}/")]
        with ThreadPoolExecutor(_READERS) as pool:
            records = [record for record in pool.map(self._remembered, keys) if record is not None]
        kept = [item for item in records if not self._expired(item) and purpose in (None, item.purpose)]
        return sorted(kept, key=lambda item: (item.created_at, item.id), reverse=True)

    def page(
        self, tenant: str, purpose: str | None, limit: int, descending: bool, after: str | None
    ) -> tuple[list[FileRecord], bool]:
        """Return up to `limit` files behind `after`, and whether there are more."""
        files = self.newest(tenant, purpose)
        if not descending:
            files.reverse()
        if after is not None:
            files = _behind(files, after, self._place(tenant, after), descending)
        return files[:limit], len(files) > limit

    def delete(self, record: FileRecord, keep_bytes: bool) -> None:
        """Forget a file. `keep_bytes`: an unfinished job still reads them."""
        self.store.delete(record_key(record.tenant, record.id))
        if not keep_bytes:
            self.store.delete(record.key)

    def _place(self, tenant: str, file_id: str) -> tuple[int, str]:
        # A client that deletes while it pages asks for what comes after a file that is gone: records do not
        # change, so the remembered one, or the time in the id, still tells its place.
        if not (file_id.startswith("file") and ids.is_id(file_id)):
            raise refusal(f"after must be the id of a file, not {file_id!r:.80}.", "after")
        record = self._remembered(record_key(tenant, file_id))
        return (record.created_at if record else int(made_at(file_id))), file_id

    def _read(self, key: str) -> FileRecord | None:
        try:
            return FileRecord.from_json(self.store.get(key))
        except errors.NotFound:
            return None

    def _expired(self, record: FileRecord) -> bool:
        return record.expires_at is not None and record.expires_at <= self._clock()


def made_at(name: str) -> float:
    """Return the unix time (to the millisecond) in the ULID of an id."""
    number = 0
    for letter in name.removeprefix("file-").removeprefix("batch_")[:10]:
        number = number << 5 | _ALPHABET.index(letter)
    return number / 1000


def record_key(tenant: str, file_id: str) -> str:
    return f"file-records/{tenant}/{file_id}.json"


def write_record(store: ObjectStore, record: FileRecord) -> None:
    """Write the record that makes bytes a file; of one that expires, first the marker for the sweep."""
    if record.expires_at is not None:
        store.put(f"expiring/{record.tenant}/{record.id}@{record.expires_at}", b"")
    store.put(record_key(record.tenant, record.id), record.to_json())


def _behind(
    files: list[FileRecord], after: str, place: tuple[int, str], descending: bool
) -> list[FileRecord]:
    for index, item in enumerate(files):
        if item.id == after:
            return files[index + 1 :]
    if descending:
        return [item for item in files if (item.created_at, item.id) < place]
    return [item for item in files if (item.created_at, item.id) > place]
