"""Celery's Redis transport, but an item that is no message is dropped instead of ending the worker."""

import base64
import json
import logging
import queue
from typing import Any

from kombu.transport import redis

log = logging.getLogger(__name__)

_SHOWN = 200


class Channel(redis.Channel):
    """Reads messages; what cannot be read as one is logged and dropped (it has left Redis already)."""

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except ValueError as error:  # not JSON, not UTF-8
            log.error("message dropped: not readable", extra={"reason": str(error)[:_SHOWN]})
            raise queue.Empty from None


class Transport(redis.Transport):
    """Delivers only what has the form of a Celery message."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        try:
            _check(message)
        except (TypeError, KeyError, ValueError) as error:
            details = {"queue": queue, "reason": repr(error)[:_SHOWN], "item": repr(message)[:_SHOWN]}
            log.error("message dropped: not a Celery message", extra=details)
        else:
            super()._deliver(message, queue)


def _check(item: Any) -> None:
    """Raise TypeError, KeyError or ValueError unless `item` is JSON in an envelope as Celery's."""
    properties = item["properties"]
    for needed in (item["headers"], properties["delivery_info"]):
        if not isinstance(needed, dict):
            raise TypeError(f"not an object: {needed!r}")
    if not isinstance(properties["delivery_tag"], str) or item["content-type"] != "application/json":
        raise ValueError("an unknown delivery_tag or content-type")
    if properties["body_encoding"] != "base64":
        raise ValueError("an unknown body_encoding")
    json.loads(base64.b64decode(item["body"]))
