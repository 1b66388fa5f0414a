"""Calls to an S3 server: each retried while the failure may pass, each failure told in one line."""

import logging
import math
import random
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from jobs import errors
from jobs.metrics import shared
from jobs.settings import Settings

log = logging.getLogger(__name__)

ATTEMPTS = 8
FIRST_DELAY_SECONDS = 0.2
LONGEST_DELAY_SECONDS = 5.0

_making_client = threading.Lock()  # a session, unlike a client, is not safe for threads

# What can happen between here and the server; the next connection may do better.
BROKEN = (
    botocore.exceptions.HTTPClientError,
    botocore.exceptions.ConnectionError,
    botocore.exceptions.IncompleteReadError,
    botocore.parsers.ResponseParserError,
    urllib3.exceptions.HTTPError,
    OSError,
)
_PASSING_CODES = {"InternalError", "OperationAborted", "RequestTimeout", "SlowDown", "Throttling"}
_REASONS = {
    "AccessDenied": "access denied",
    "InvalidAccessKeyId": "the access key id is not known",
    "SignatureDoesNotMatch": "the secret access key is wrong",
    "NoSuchBucket": "bucket {bucket!r} does not exist",
}


@dataclass(frozen=True)
class Reply:
    """An answer of the server: HTTP status, S3 error code ('' if none), and what boto3 made of the rest."""

    status: int
    code: str
    fields: dict[str, Any]

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def mark(self) -> str:
        """The mark that the writer of the object left, '' if none."""
        return str(self.fields.get("Metadata", {}).get("mark", ""))


class Calls:
    """A boto3 client bound to a bucket. Calls that fail are made `attempts` times, while `patience_seconds`
    have not passed.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        url: str,
        attempts: int = ATTEMPTS,
        patience_seconds: float = math.inf,
    ) -> None:
        self._client, self._bucket, self._url = client, bucket, url
        self._attempts, self._patience = attempts, patience_seconds

    def __call__(self, operation: str, accept: Collection[int] = (), **parameters: Any) -> Reply:
        """Return the reply if it succeeded or has a status in `accept`, else raise StoreUnreachable."""
        deadline = time.monotonic() + self._patience
        for attempt in range(1, self._attempts + 1):
            try:
                fields = getattr(self._client, operation)(Bucket=self._bucket, **parameters)
                return Reply(fields["ResponseMetadata"]["HTTPStatusCode"], "", fields)
            except botocore.exceptions.ClientError as error:
                reply = _reply(error)
                if not _passing(reply):
                    if reply.status in accept:
                        return reply
                    raise self.unreachable(error, parameters.get("Key")) from None
                failure: Exception = error
            except BROKEN as error:
                failure = error
            except botocore.exceptions.BotoCoreError as error:
                raise self.unreachable(error, parameters.get("Key")) from None
            if attempt == self._attempts or time.monotonic() > deadline:
                break
            self.back_off(attempt, operation, parameters.get("Key"), failure)
        raise self.unreachable(failure, parameters.get("Key")) from None

    def back_off(self, attempt: int, operation: str, key: str | None, failure: Exception | str) -> None:
        """Log the failure and wait: twice as long each time, within limits, never all clients at once."""
        shared.store_errors.inc()
        delay = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
        reason = failure if isinstance(failure, str) else self._reason(failure)
        what = {"operation": operation, "key": key, "attempt": attempt}
        extra = what | {"delay_seconds": round(delay, 2), "reason": reason}
        log.warning("store call failed, trying again", extra=extra)
        time.sleep(delay)

    def unreachable(self, failure: Exception | str, key: str | None = None) -> errors.StoreUnreachable:
        """Return the error to raise, and count it."""
        shared.store_errors.inc()
        reason = failure if isinstance(failure, str) else self._reason(failure)
        return errors.StoreUnreachable(url=self._url, reason=f"{reason} ({key})" if key else reason)

    def _reason(self, error: Exception) -> str:
        """Say in one line what went wrong. botocore's own texts hold urls and keys, so none is passed on."""
        if isinstance(error, botocore.exceptions.ClientError):
            reply = _reply(error)
            if reply.code in _REASONS:
                return _REASONS[reply.code].format(bucket=self._bucket)
            return f"the server answered {reply.status} {reply.code}".rstrip()
        if isinstance(
            error, botocore.exceptions.NoCredentialsError | botocore.exceptions.PartialCredentialsError
        ):
            return "no access key is set"
        if isinstance(error, botocore.exceptions.IncompleteReadError):
            return f"{_host(self._client.meta.endpoint_url)} closed the connection early"
        if isinstance(error, BROKEN):
            return f"no answer from {_host(self._client.meta.endpoint_url)}: {_cause(error)}"
        return type(error).__name__


def connect(settings: Settings, *, connect_seconds: float, read_seconds: float) -> Any:
    """Return a boto3 S3 client (safe for threads) that never retries by itself."""
    secret = settings.s3_secret_access_key
    config = botocore.config.Config(
        # Checksums beyond the ones S3 asks for break several S3-compatible servers.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if settings.s3_endpoint_url else None,
        retries={"mode": "standard", "total_max_attempts": 1},
        connect_timeout=connect_seconds,
        read_timeout=read_seconds,
        max_pool_connections=64,
        tcp_keepalive=True,
    )
    try:
        with _making_client:
            return _session().client(
                "s3",
                endpoint_url=settings.s3_endpoint_url,
                region_name=settings.s3_region,
                aws_access_key_id=settings.s3_access_key_id,
                aws_secret_access_key=secret.get_secret_value() if secret else None,
                config=config,
            )
    except ValueError:  # its text repeats the url, which may hold a password
        raise errors.SettingsError(
            "LONGHAUL_S3_ENDPOINT_URL is not a URL such as http://host:8333."
        ) from None
    except botocore.exceptions.PartialCredentialsError:
        raise errors.SettingsError(
            "Set both LONGHAUL_S3_ACCESS_KEY_ID and LONGHAUL_S3_SECRET_ACCESS_KEY, or neither."
        ) from None


@cache
def _session() -> Any:
    # Kept, because each new one reads boto3's description of S3 again: 0.2 s.
    return boto3.session.Session()


def _reply(error: botocore.exceptions.ClientError) -> Reply:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # A reply without a body (HEAD) has its status for a code.
    return Reply(status, "" if code == str(status) else code, error.response)


def _passing(reply: Reply) -> bool:
    return (
        reply.code in _PASSING_CODES or reply.status == 429 or (reply.status >= 500 and reply.status != 501)
    )


def _host(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _cause(error: BaseException) -> str:
    """Return what the operating system said at the bottom of a chain of wrapped errors."""
    text, seen = type(error).__name__, set[int]()
    while id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.strerror:
            text = error.strerror
        inner = error.kwargs.get("error") if isinstance(error, botocore.exceptions.BotoCoreError) else None
        reason = getattr(error, "reason", None)
        for other in (inner, reason, error.__cause__, error.__context__):
            if isinstance(other, BaseException):
                error = other
                break
    return text
