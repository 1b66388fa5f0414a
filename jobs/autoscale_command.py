"""The command `longhaul autoscale`."""

import errno
import functools
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from jobs import autoscale, autoscale_lines, errors, hints, named_store, scaling, slots, values
from jobs.ledger import Ledger
from jobs.settings import Settings

_LOOK_SECONDS = 2.0


_GPU = re.compile(r"\d+|(GPU|MIG)-[\w./-]+")


def _ids(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found or len(set(found)) < len(found) or not all(map(_GPU.fullmatch, found)):
        words = "is not a list of different GPUs such as 0,1 or GPU-8932f937,MIG-1a2b"
        raise click.BadParameter(f"{text!r} {words}", param_hint="--gpus")
    return found


@click.command("autoscale", short_help="Start and stop workers here as work comes and goes.")
@click.option(
    "--min",
    "least",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Keep so many of each model.",
)
@click.option("--max", "most", type=click.IntRange(min=1), help="Most workers.  [default: one a slot]")
@click.option(
    "--gpus", type=_ids, metavar="0,1,..", help="One worker at most on each.  [default: all there are]"
)
@click.option("--cpus", type=click.IntRange(min=1), metavar="K", help="K slots for workers without a GPU.")
@click.option(
    "--logs",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".longhaul/logs"),
    show_default=True,
    help="Where the workers' logs go.",
)
@click.option("as_json", "--json", is_flag=True, help="Print events as JSON, one a line.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Start and stop nothing, write no log; say what would be done, until Ctrl-C.",
)
def command(
    least: int,
    most: int | None,
    gpus: list[str] | None,
    cpus: int | None,
    logs: Path,
    as_json: bool,
    dry_run: bool,
) -> None:
    """Start and stop workers on this machine as work comes and goes, down to none.

    It looks at what is left in Redis and runs one 'celery -A worker worker' for each slot it needs: a GPU, or
    with --cpus a share of the processors. Settings are a worker's (docs/settings.md); with several models in
    LONGHAUL_MODELS it divides the slots. A worker that holds requests is never killed: it claims no more, and
    ends when they are done. Ctrl-C lets all drain (LONGHAUL_DRAIN_SECONDS), exit code 0; 1 when workers end
    again and again in every slot. Workers elsewhere count. docs/scaling.md tells how it decides.

    \b
    longhaul autoscale --max 4                   # GPUs 0 to 3, none while nothing is to do
    longhaul autoscale --min 1 --gpus 0,2
    longhaul autoscale --cpus 2 --json
    longhaul autoscale --max 8 --dry-run
    """
    names = _names(gpus, cpus)
    most = _most(least, most, len(names))
    settings = _settings()
    places = slots.cpu_slots(cpus, logs, settings) if cpus else slots.gpu_slots(names, logs, settings)
    policy = scaling.Policy(
        least,
        most,
        target_seconds=settings.scale_target_seconds,
        spare_seconds=settings.scale_idle_seconds,
        idle_seconds=settings.scale_idle_seconds,
    )
    several = (settings.model is None and len(settings.models) != 1) or settings.model == "none"
    control = slots.Slot("control", {"CUDA_VISIBLE_DEVICES": ""}, logs, settings) if several else None
    printer = _lasting(_json if as_json else _text)
    ledger = Ledger.connect(settings)
    scaler = autoscale.Autoscaler(settings, ledger.fleet, places, policy, printer, control, dry_run)
    _run(
        scaler, dry_run, functools.partial(printer, "watching", _watching(settings, places, policy, dry_run))
    )


def _names(gpus: list[str] | None, cpus: int | None) -> list[str]:
    """Return the slots that are asked for; say what looks like a mistake."""
    if cpus:
        if gpus is not None:
            raise click.UsageError("--gpus and --cpus exclude each other: run one autoscaler for each.")
        return [str(number) for number in range(cpus)]
    there = slots.gpus()
    names = there if gpus is None else gpus
    if not names:
        raise click.UsageError("No NVIDIA GPU is found here: name them with --gpus, or say --cpus K.")
    if missing := [name for name in names if name.isdigit() and name not in there]:
        found = f"there are {', '.join(there)}" if there else "no NVIDIA GPU is found here"
        click.echo(f"longhaul: --gpus {','.join(missing)}: {found}. Workers may not come to serve.", err=True)
    return names


def _most(least: int, most: int | None, places: int) -> int:
    if most is not None and most > places:
        click.echo(f"longhaul: --max {most} is more than there are slots; it is {places}.", err=True)
    most = min(most or places, places)
    if least > most:
        raise click.BadParameter(f"{least} is more than {most}, the most there may be", param_hint="--min")
    return most


def _settings() -> Settings:
    settings = Settings.load()
    if not settings.models and settings.model != "none":
        raise errors.SettingsError(
            "LONGHAUL_MODELS is empty: there is nothing to scale. Of a running 'longhaul up' the settings are"
            f" in the file 'environment' of its --dir: {hints.variables()}"
        )
    if settings.model is not None:
        _ = settings.served  # raises SettingsError for a model that is none of those
    named_store.require()  # its workers have the variables of this process
    return settings


def _watching(
    settings: Settings, places: list[slots.Slot], policy: scaling.Policy, dry: bool
) -> dict[str, Any]:
    served = list(settings.models) if settings.model is None else list(settings.served)
    return {
        "models": served,
        "not_scaled": [name for name in settings.models if name not in served],
        "slots": [slot.name for slot in places],
        "min": policy.least,
        "max": policy.most,
        "dry_run": dry,
    }


def _run(scaler: autoscale.Autoscaler, dry: bool, begun: Callable[[], None]) -> None:
    stopping = threading.Event()

    def interrupt(number: int, frame: object) -> None:
        if stopping.is_set() and number == signal.SIGINT:  # a second Ctrl-C does not wait for the workers
            raise KeyboardInterrupt
        stopping.set()
        scaler.begin_stop()  # a turn may wait for a Redis that hangs

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        if not dry:
            scaler.lock()
        begun()
        while not stopping.is_set():
            scaler.turn()
            stopping.wait(_LOOK_SECONDS)
    finally:
        scaler.stop()


def _lasting(say: autoscale.Report) -> autoscale.Report:
    """Have nothing end because nobody reads any more, or there is no room for it: workers would go, too."""

    def report(event: str, facts: dict[str, Any]) -> None:
        try:
            say(event, facts)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for good
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    return report


def _json(event: str, facts: dict[str, Any]) -> None:
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    click.echo(json.dumps({"time": stamp, "event": event} | facts))


def _text(event: str, facts: dict[str, Any]) -> None:
    said = values.printable_lines(autoscale_lines.line(event, facts))
    click.echo(f"{time.strftime('%H:%M:%S')}  {said}")
