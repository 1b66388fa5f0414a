"""What is checked before a worker starts, so that a mistake ends it with one line instead of a retry loop."""

import logging

from kombu import entity

from jobs import queue, store, template
from jobs.settings import Settings

log = logging.getLogger(__name__)


def level(name: int | str | None) -> int:
    """Return a log level as a number; Celery hands over either form."""
    if isinstance(name, int):
        return name
    return logging.getLevelNamesMapping().get((name or "WARNING").upper(), logging.WARNING)


def check(settings: Settings) -> list[entity.Queue]:
    """Log the settings (secrets masked), try Redis and the store, and return the queues to consume.

    Raises SettingsError, also for a chat template that is none, RedisUnreachable or StoreUnreachable. A Redis
    that is lost later is waited for.
    """
    log.info("settings", extra={"settings": settings.shown()})
    for model in settings.models.values():
        if model.chat_template is not None:
            template.read(model.chat_template)
    consumed = queue.queues(settings)
    queue.check(settings)
    store.open_store(settings).check()
    return consumed
