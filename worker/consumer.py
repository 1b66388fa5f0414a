"""The consumer of the worker: Celery's, that comes back quickly after Redis was away."""

import logging
from typing import Any

from celery.worker import consumer, state

log = logging.getLogger(__name__)

# Mingle waits a second for neighbours at each start and reconnect, gossip and heartbeats cost a connection
# each; nothing here uses them: who works on what is the ledger's matter.
_WITHOUT = {"without_mingle": True, "without_gossip": True, "without_heartbeat": True}
_MALFORMED = (TypeError, ValueError, KeyError, AttributeError)


class Consumer(consumer.Consumer):
    """Waits for a lost Redis for ever, in short steps, and outlives any message."""

    def __init__(self, *args: Any, worker_options: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, worker_options={**(worker_options or {}), **_WITHOUT}, **kwargs)

    def ensure_connected(self, connection: Any) -> Any:
        """Connect, however long it takes, unless the worker is told to stop."""
        connected = connection.ensure_connection(
            self._on_failure,
            max_retries=None,
            interval_start=0.2,
            interval_step=0.2,
            interval_max=1,
            callback=state.maybe_shutdown,
        )
        self.first_connection_attempt = False
        return connected

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the handler of messages: one that is malformed inside is rejected and logged."""
        handle = super().create_task_handler(*args, **kwargs)

        def guarded(message: Any) -> None:
            try:
                handle(message)
            except _MALFORMED as error:
                log.error("message dropped: malformed", extra={"reason": repr(error)}, exc_info=True)
                message.reject_log_error(log, self.connection_errors)

        return guarded

    def _on_failure(self, error: Exception, seconds: float) -> None:
        log.warning("Redis does not answer", extra={"reason": str(error), "retry_seconds": seconds})
