"""The Celery side of the queue: names, broker options, and a producer. A message is only ever a wake-up.

The ledger holds the work, so a message that is lost or doubled costs at most one poll interval: a producer
logs what it cannot send, and never fails its caller.
"""

import logging
import ssl
import threading
import time
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import redis
from celery import Celery
from kombu import entity, exceptions

from jobs import errors
from jobs.masking import without_password
from jobs.settings import Settings

CONTROL = "control"
PLAN, FEED, FINALIZE, WAKE = "longhaul.plan", "longhaul.feed", "longhaul.finalize", "longhaul.wake"
UNIT_TASKS = {"plan": PLAN, "feed": FEED, "finalize": FINALIZE}

_PING_SECONDS = 2

log = logging.getLogger(__name__)


def model_queue(fingerprint: str) -> str:
    """Return the queue of a model's wakes. Quoted, because Celery splits lists of queues at commas."""
    return "model." + quote(fingerprint, safe="/:@")


def queue_of(task: str, args: tuple[Any, ...]) -> str:
    """Return where a task of ours goes: wakes to their model's queue, units to `control`."""
    return model_queue(args[0]) if task == WAKE else CONTROL


def queues(settings: Settings) -> list[entity.Queue]:
    """Return what a worker with these settings consumes: `control`, and the wakes of the models it serves."""
    names = [CONTROL, *(model_queue(settings.fingerprints[name]) for name in settings.served)]
    return [entity.Queue(name, entity.Exchange(name), routing_key=name) for name in names]


def options(settings: Settings, socket_seconds: float) -> dict[str, Any]:
    """Return the Celery configuration that producers and workers must agree on.

    `socket_seconds` bounds every wait for Redis: a Redis that hangs is noticed no sooner than that.
    """
    secure = settings.redis_url.startswith("rediss://")
    return {
        "broker_url": _broker_url(settings.redis_url),
        "broker_use_ssl": {"ssl_cert_reqs": ssl.CERT_REQUIRED} if secure else None,
        "broker_transport_options": {
            "global_keyprefix": f"{{{settings.namespace}}}:celery:",
            "visibility_timeout": 3600,
            "socket_timeout": socket_seconds,
            "socket_connect_timeout": socket_seconds,
            "socket_keepalive": True,
            "health_check_interval": 5,
        },
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "result_backend": None,
        "task_ignore_result": True,
        "task_default_queue": CONTROL,
    }


def check(settings: Settings, patience_seconds: float = 4) -> None:
    """Raise RedisUnreachable when Redis does not answer within `patience_seconds`: it may be starting too."""
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            with redis.Redis.from_url(
                settings.redis_url, socket_connect_timeout=_PING_SECONDS, socket_timeout=_PING_SECONDS
            ) as client:
                client.ping()
                return
        except (redis.RedisError, OSError, ValueError) as error:
            passing = isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError)
            refused = isinstance(error, redis.AuthenticationError)
            if refused or not passing or time.monotonic() > deadline:
                url = without_password(settings.redis_url)
                raise errors.RedisUnreachable(url=url, reason=str(error) or type(error).__name__) from None
        time.sleep(0.2)


class Producer:
    """Sends tasks by name, from any thread; `send` returns within about `seconds`, whatever Redis does."""

    def __init__(self, settings: Settings, seconds: float = 0.5, pause_seconds: float = 1) -> None:
        self._app = Celery("longhaul-producer", set_as_current=False)
        self._app.conf.update(options(settings, seconds), broker_pool_limit=8, task_publish_retry=False)
        self._pause_seconds = pause_seconds
        self._silent_until = 0.0
        self._lock = threading.Lock()

    def send(self, task: str, *args: Any) -> bool:
        """Send a wake-up; tell whether Redis took it. Never raises for a Redis that is away or slow."""
        if time.monotonic() < self._silent_until:
            return False
        try:
            # One at a time: a Redis that hangs must hold up one caller, not one for each connection.
            with self._lock:
                if time.monotonic() < self._silent_until:
                    return False
                # No declaration: a direct exchange needs none, and one round trip is enough.
                self._app.send_task(task, args, queue=queue_of(task, args), declare=[], retry=False)
        except (exceptions.KombuError, redis.RedisError, OSError) as error:
            self._silent_until = time.monotonic() + self._pause_seconds
            log.warning("wake not sent", extra={"task": task, "args_sent": args, "reason": str(error)})
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._app.close()


def _broker_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        database = dict(p.partition("=")[::2] for p in parts.query.split("&")).get("db", "0")
        return f"redis+socket://{parts.netloc}{parts.path}?{urlencode({'virtual_host': database})}"
    return url
