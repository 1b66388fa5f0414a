"""What a tenant may have open, store and ask for. Who is over it is told 429 and when to come again."""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from jobs import errors, ids
from jobs.files import Files
from jobs.ledger import Ledger
from jobs.settings import Quota, Settings

log = logging.getLogger(__name__)
ANYONE = "*"
BYTES_PER_TOKEN = 4
"""What a token of English text takes: the guess until the plan has counted."""
_RETRY_SECONDS = 30


class Quotas:
    """The quotas of all tenants: those of their name, else of `*`; nobody is limited by what is not set."""

    def __init__(self, settings: Settings, ledger: Ledger, files: Files) -> None:
        self._settings, self._ledger, self._files = settings, ledger, files

    def of(self, tenant: str) -> Quota:
        """Return what a tenant may have."""
        return self._settings.quotas.get(tenant) or self._settings.quotas.get(ANYONE) or Quota()

    def check_rate(self, tenant: str) -> None:
        """Count one call of the API; raise QuotaExceeded when there were too many in the last minute."""
        most = self.of(tenant).requests_per_minute
        if most is None:
            return
        try:
            seconds = self._ledger.tenants.wait_seconds(tenant, most)
        except redis.RedisError as error:
            # Then nothing is queued either, and a status may still be asked for.
            log.warning("calls not counted: Redis does not answer", extra={"reason": str(error)})
            return
        if seconds > 0:
            raise errors.RateExceeded(tenant=tenant, most=most, retry_seconds=max(1, math.ceil(seconds)))

    def reserve(self, tenant: str, job_id: str, requests: int, size: int) -> None:
        """Count a job of so many requests in so many bytes as open; raise QuotaExceeded."""
        quota = self.of(tenant)
        if quota.open_requests is None and quota.open_tokens is None:
            return
        wanted = {"requests": requests, "tokens": size // BYTES_PER_TOKEN}
        limits = {"requests": quota.open_requests, "tokens": quota.open_tokens}
        for what, most in limits.items():
            if most is not None and wanted[what] > most:
                raise errors.QuotaTooSmall(wanted=wanted[what], tenant=tenant, what=what, most=most)
        refused = self._ledger.tenants.reserve(tenant, job_id, *wanted.values(), *limits.values())
        if refused is not None:
            what, taken = refused
            told = f"open {what}, of which {taken} are taken"
            raise _exceeded(tenant, told, limits[what], f"open_{what}")

    def give_back(self, tenant: str, job_id: str) -> None:
        """Count a job no more that will not be entered."""
        self._ledger.tenants.give_back(tenant, job_id)

    @contextmanager
    def storing(
        self, tenant: str, size: int, name: str | None = None, file_id: str | None = None
    ) -> Iterator[None]:
        """Enter while a file of so many bytes is stored; raises QuotaExceeded.

        Those of one `name` are one file, which may lie in the store already as `file_id`: it counts once.
        """
        most = self.of(tenant).file_bytes
        if most is None:
            yield
            return
        if size > most:
            raise errors.QuotaTooSmall(wanted=size, tenant=tenant, what="bytes of files", most=most)
        upload = name or ids.ulid()
        # Its own place first, then what lies there: of two at once, at least one sees the other.
        others = self._ledger.tenants.hold_bytes(tenant, upload, size)
        try:
            taken = others + sum(file.bytes for file in self._files.newest(tenant) if file.id != file_id)
            if taken + size > most:
                what = f"bytes of files, of which {taken} are taken (delete some)"
                raise _exceeded(tenant, what, most, "file_bytes")
            yield
        finally:
            try:
                self._ledger.tenants.let_bytes_go(tenant, upload, size)
            except redis.RedisError as error:
                # What was stored is stored: it is no failure that it counts twice until the hold lapses.
                log.warning("bytes held on: Redis does not answer", extra={"reason": str(error)})


def _exceeded(tenant: str, what: str, most: int | None, name: str) -> errors.QuotaExceeded:
    return errors.QuotaExceeded(tenant=tenant, what=what, most=most, name=name, retry_seconds=_RETRY_SECONDS)
