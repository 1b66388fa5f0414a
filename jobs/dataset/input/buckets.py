"""The file systems of inputs: this machine's, and S3 by the AWS_ variables or by Longhaul's own settings."""

import os
from typing import Any

from pyarrow import fs

from jobs import settings
from jobs.dataset.input import input_errors


def opened(place: str) -> tuple[Any, str, str]:
    """Return the file system of a place, the path in it, and what goes before a path to show it."""
    if place.startswith("s3://"):
        return _s3(), place.removeprefix("s3://").rstrip("/"), "s3://"
    if "://" in place:
        raise input_errors.InputUnreadable(where=place, reason="only local paths and s3:// are read")
    path = os.path.expanduser(place)
    return fs.LocalFileSystem(), path.rstrip("/") or "/", ""


def _s3() -> Any:
    """Connect to S3. What the AWS_ variables say about the endpoint goes before LONGHAUL_S3_ENDPOINT_URL."""
    ours = settings.Settings.load()
    theirs = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    secret = ours.s3_secret_access_key
    keys = {}
    if secret is not None and not theirs:
        keys = {"access_key": ours.s3_access_key_id, "secret_key": secret.get_secret_value()}
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ours.s3_region
    try:
        return fs.S3FileSystem(
            endpoint_override=theirs or ours.s3_endpoint_url,
            region=region,
            connect_timeout=5,
            request_timeout=ours.s3_timeout_seconds,
            **keys,
        )
    except (OSError, ValueError) as error:
        raise input_errors.InputUnreadable(where="S3", reason=error) from None
