"""The API keys as this process knows them: read from the store every few seconds, if somebody asks."""

import logging
import threading
import time
from collections.abc import Callable, Mapping

from jobs import errors, keys
from jobs.keys import KeyRecord
from jobs.store import ObjectStore

log = logging.getLogger(__name__)

# A key that is made or revoked counts after their sum at the latest, as long as the store answers.
_FRESH_SECONDS = 2.0
_WAIT_SECONDS = 3.0


class Keyring:
    """All keys of the store. When it does not answer, what was known last stays valid."""

    def __init__(self, store: ObjectStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._known: dict[str, KeyRecord | None] | None = None
        self._next_read = clock()
        self._silent = False
        self._reading = threading.Lock()

    def known(self) -> Mapping[str, KeyRecord | None]:
        """Return the records by id, revoked ones too; raise Unavailable if they were never read.

        One thread reads. The others wait for it a little, unless the store is known to be silent.
        """
        wait = 0 if self._silent else _WAIT_SECONDS
        if self._clock() >= self._next_read and self._reading.acquire(timeout=wait):
            try:
                if self._clock() >= self._next_read:
                    self._read()
            finally:
                self._reading.release()
        if self._known is None:
            raise errors.Unavailable("The API keys cannot be read at the moment. Send the request again.")
        return self._known

    def _read(self) -> None:
        began = self._clock()
        try:
            self._known = self._found(self._known or {})
        except errors.LonghaulError as error:
            self._next_read = self._clock() + _FRESH_SECONDS
            if not self._silent:
                log.warning("API keys not read; those known stay valid", extra={"reason": str(error)})
            self._silent = True
        else:
            self._next_read = began + _FRESH_SECONDS
            self._silent = False

    def _found(self, old: dict[str, KeyRecord | None]) -> dict[str, KeyRecord | None]:
        names = keys.listed(self._store)
        if old and not names:
            # Nothing of ours deletes a record: this store is not the one it was (a volume unmounted, say).
            raise errors.StoreUnreachable(url=self._store.url, reason="all its API keys are gone")
        kept = {name: old[name] for name, revoked in names.items() if not _is_news(old.get(name), revoked)}
        return kept | keys.read_all(self._store, {name: names[name] for name in names if name not in kept})


def _is_news(record: KeyRecord | None, revoked: bool) -> bool:
    return record is None or (record.revoked_at is not None) != revoked
