"""Celery's Redis transport, but an item that is no message is dropped instead of ending the worker."""

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
        except ValueError as error:  # not JSON, not UTF-8, not base64
            log.error("message dropped: not readable", extra={"reason": str(error)[:_SHOWN]})
            raise queue.Empty from None


class Transport(redis.Transport):
    """Delivers only what has the form of a Celery message."""

    Channel = Channel

    def _deliver(self, message: Any, queue: str) -> None:
        if _is_message(message):
            super()._deliver(message, queue)
        else:
            log.error(
                "message dropped: not a Celery message",
                extra={"queue": queue, "item": repr(message)[:_SHOWN]},
            )


def _is_message(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("properties"), dict):
        return False
    properties = item["properties"]
    return (
        isinstance(item.get("body"), str)
        and isinstance(item.get("headers"), dict)
        and "delivery_tag" in properties
        and isinstance(properties.get("delivery_info"), dict)
    )
