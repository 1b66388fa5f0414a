"""The step of Celery's worker that runs the service: started after the pool, stopped before it."""

import logging
import os
import signal
import sys
import threading
from typing import Any

from celery import apps, bootsteps, signals
from celery.worker import state
from kombu.utils import imports

from jobs import errors
from worker import supervisor

log = logging.getLogger(__name__)

_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class ServiceStep(bootsteps.StartStopStep):
    """Holds the service of this worker.

    A stop comes by signal, by remote control or from Celery itself, and may come several ways at once. All
    lead to `Supervisor.begin_stop`; the first one makes further signals harmless.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        app = worker.app
        if options.get("exit_when_idle") is not None:
            update = {"exit_when_idle_seconds": options["exit_when_idle"]}
            app.settings = app.settings.model_copy(update=update)
        try:
            app.service = imports.symbol_by_name(app.service_class)(app.settings)
        except errors.LonghaulError as error:
            sys.exit(f"longhaul: {error}")
        self._supervisor = supervisor.Supervisor(
            app.service,
            app.settings.drain_seconds,
            end=_end,
            wake=lambda: worker.pool.wake(),
            busy=lambda: worker.pool.busy,
        )
        signals.worker_shutting_down.connect(self._on_signal)
        signals.worker_shutdown.connect(self._on_shutdown)

    def start(self, worker: Any) -> None:
        """Start the service. Every signal drains: threads cannot be shut down cold."""
        if _in_main_thread():
            apps.worker.install_worker_term_handler(worker, verbose=False)
            for number in _STOPPING:
                signal.signal(number, signal.getsignal(signal.SIGTERM))
        self._supervisor.start()

    def close(self, worker: Any) -> None:
        """Begin to stop, before Celery stops anything."""
        self._begin_stop()

    def stop(self, worker: Any) -> None:
        """Wait until the service has stopped."""
        self._begin_stop()
        self._supervisor.wait()

    terminate = stop

    def _begin_stop(self) -> None:
        if _in_main_thread():
            for number in _STOPPING:
                signal.signal(number, signal.SIG_IGN)
        self._supervisor.begin_stop()

    def _on_signal(self, **_: Any) -> None:
        self._begin_stop()

    def _on_shutdown(self, sender: Any, **_: Any) -> None:
        """Set the exit code; do not let the interpreter unload under a thread that loads or runs a model."""
        sender.exitcode = sender.exitcode or self._supervisor.exit_code
        if self._supervisor.loading or _model_threads():
            logging.shutdown()
            os._exit(sender.exitcode)


def _end(code: int) -> None:
    state.should_stop = code


def _model_threads() -> list[str]:
    """Name the engine's threads that still run: torch aborts when it is unloaded under one of them."""
    return [thread.name for thread in threading.enumerate() if thread.name in ("engine", "generate", "warm")]


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
