"""The Celery application. `celery -A worker worker` needs no flags: all of it is configured here."""

import logging
import os
import sys
from typing import Any

import click
from celery import Celery, signals
from celery.utils import nodenames
from kombu.transport.virtual import base

from jobs import errors, log, queue
from jobs.settings import Settings
from worker import inspect, startup  # noqa: F401  (inspect registers a command)

_events = logging.getLogger(__name__)

# Units are short and mostly wait for the store; the engine has threads of its own.
THREADS = 4


_EXIT_WHEN_IDLE = click.Option(
    ["--exit-when-idle"],
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="End, with exit code 0, after so long without work (LONGHAUL_EXIT_WHEN_IDLE_SECONDS).",
)


class Application(Celery):
    """A Celery application that knows its settings and, in a worker, its service."""

    settings: Settings
    service_class = "worker.service:Service"
    service: Any = None


def create(settings: Settings) -> Application:
    """Return the application for these settings."""
    made = Application("longhaul", include=["worker.tasks"])
    made.settings = settings
    made.conf.update(
        queue.options(settings, socket_seconds=5),
        broker_transport="worker.transport:Transport",
        broker_connection_max_retries=None,
        broker_connection_retry_on_startup=True,
        broker_channel_error_retry=True,
        worker_pool="worker.pool:TaskPool",
        worker_consumer="worker.consumer:Consumer",
        worker_concurrency=THREADS,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        worker_redirect_stdouts=False,
        task_acks_late=False,
    )
    made.steps["worker"].add("worker.bootstep:ServiceStep")
    made.user_options["worker"].add(_EXIT_WHEN_IDLE)
    return made


@signals.setup_logging.connect
def _log_as_json(loglevel: int, logfile: str | None = None, **_: Any) -> None:
    log.setup(loglevel, logfile, app.settings.log_format)


@signals.celeryd_init.connect
def _start(instance: Any, options: dict[str, Any], **_: Any) -> None:
    """Check what the settings name before Celery tries it for ever; end with one line otherwise."""
    instance.quiet = True  # no banner: every line is an event
    if instance.hostname == nodenames.default_nodename(None):
        # Several workers of one machine must not answer remote control under one name.
        instance.hostname = instance.hostname.replace("@", f"-{os.getpid()}@", 1)
    level = startup.level(options.get("loglevel"))
    log.setup(level, options.get("logfile"), instance.app.settings.log_format)
    try:
        instance.app.conf.task_queues = startup.check(instance.app.settings)
    except errors.LonghaulError as error:
        sys.exit(f"longhaul: {error}")


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of the transport is one: a wake that came just after a worker had stopped to consume is
    put back for another, as it should be.
    """
    return record.msg != base.W_NO_CONSUMERS


logging.getLogger(base.__name__).addFilter(_is_news)


@signals.worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    names = sorted(sender.app.amqp.queues.consume_from)
    _events.info("ready", extra={"hostname": sender.hostname, "queues": names})


try:
    app = create(Settings.load())
except errors.SettingsError as error:
    sys.exit(f"longhaul: {error}")
