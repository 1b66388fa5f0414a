"""The thread pool of the worker: Celery's, plus what it lacks to be prompt and to stop quietly."""

from typing import Any

from celery.concurrency import thread


class TaskPool(thread.TaskPool):
    """A thread pool that wakes the event loop whenever a task is done.

    Without that, the loop asks Redis for the next message only on its 1 s tick once all threads were busy: 4
    tasks a second instead of 80.
    """

    _hub: Any = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._running: set[Any] = set()

    @property
    def busy(self) -> bool:
        """Whether a task runs or waits for a thread."""
        return bool(self._running)

    def register_with_event_loop(self, hub: Any) -> None:
        """Remember the loop to wake; called again after each reconnect."""
        self._hub = hub

    def wake(self) -> None:
        """Make the event loop look around now. Safe from any thread, not from a signal handler."""
        if self._hub is not None:
            self._hub.call_soon(_look_around)

    def on_apply(self, *args: Any, **options: Any) -> Any:
        """Run one task in a thread."""
        result = super().on_apply(*args, **options)
        self._running.add(result.f)
        result.f.add_done_callback(self._on_done)
        return result

    def _on_done(self, future: Any) -> None:
        self._running.discard(future)
        self.wake()

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Do nothing: a thread cannot be killed, and asking for it must not break a shutdown."""


def _look_around() -> None:
    """Nothing to do: being called is what makes the loop go round."""
