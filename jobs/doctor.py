"""The command `longhaul doctor`: looks at everything a deployment stands on, and says what to do."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
import orjson

from jobs import (
    commands,
    doctor_findings,
    doctor_machine,
    doctor_redis,
    doctor_server,
    doctor_settings,
    doctor_store,
    errors,
    hints,
    masking,
    named_store,
    terminal,
    values,
)
from jobs.doctor_findings import Area, Finding, Look
from jobs.model_settings import ModelSettings
from jobs.settings import CLIENT_VARIABLES, PREFIX, URL_VARIABLE, Settings

_SECONDS = 30.0
_MODEL_SECONDS = 120.0
_MARKS = {"ok": "ok", "warning": "warning", "wrong": "WRONG", "unchecked": "not checked"}
_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "red", "unchecked": "cyan"}


@click.command(short_help="Check all that Longhaul stands on; say what to do.")
@click.option(
    "directory",
    "--dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="The directory of a running 'longhaul up', for its settings.  [default: .longhaul, where one runs"
    " and no LONGHAUL_ variable is set]",
)
@click.option(
    "models",
    "--model",
    metavar="[NAME=]SOURCE",
    multiple=True,
    help="Look at this model too: a hub id, a directory or a GGUF file. Repeatable.",
)
@commands.talks_to_server
def doctor(session: commands.Session, directory: Path | None, models: tuple[str, ...]) -> None:
    """Check everything that Longhaul stands on here, and say what to do about it.

    Settings; Redis (version, eviction, persistence, memory, clock); the store (access, conditional writes,
    multipart, clock); models (files, tokenizer, chat template, memory, disk); GPU, driver, flash-attn,
    compiler; the API, its key and its workers. Each is ok, a warning, wrong, or not checked, with why. What
    does not answer is given up in time; nothing is downloaded (a hub is asked whether it has a model), and
    what is written is removed again.

    Exit code 1 if something is wrong, else 0.

    \b
    longhaul doctor
    longhaul doctor --dir .longhaul --model smol=HuggingFaceTB/SmolLM2-135M-Instruct
    longhaul doctor --json | jq -r 'select(.state == "wrong") | .advice'
    """
    source = click.get_current_context().get_parameter_source("url")
    named = source is not click.core.ParameterSource.DEFAULT
    wrong = 0
    with _environment(directory) as place:
        if place is not None and not named and URL_VARIABLE in os.environ:
            session, named = (
                commands.Session(os.environ[URL_VARIABLE], session.api_key, session.as_json),
                True,
            )
        for finding in _findings(session, models, place, named):
            wrong += finding.state == "wrong"
            _print(finding, session.as_json)
    raise SystemExit(1 if wrong else 0)


def _findings(
    session: commands.Session, models: tuple[str, ...], place: Path | None, named: bool
) -> Iterator[Finding]:
    look = Look("settings")
    if place is not None:
        yield look.ok("source", f"those that 'longhaul up' left in {place}")
    settings, faults = _readable()
    for name, said in faults.items():
        advice = f"Correct or unset {name} (docs/settings.md); what follows is without it."
        yield look.wrong("readable", said, advice)
    if settings is None:
        for area in ("redis", "store", "machine"):
            yield Look(area).unchecked("all", "the settings cannot be read")
        yield from doctor_findings.run([_server(session, named, place)])
        return
    served = _served(settings, models)
    yield from doctor_findings.run(
        [
            Area("settings", lambda: doctor_settings.check(settings), _SECONDS),
            Area("redis", lambda: doctor_redis.check(settings), _SECONDS),
            Area("store", lambda: doctor_store.check(settings), 2 * _SECONDS),
            _server(session, named, place),
            Area("machine", lambda: doctor_machine.check(_MODEL_SECONDS, served), _MODEL_SECONDS + 5),
        ]
    )


def _readable() -> tuple[Settings | None, dict[str, str]]:
    """Return the settings without the variables that cannot be read, which are taken away, and what is wrong
    with each of these; None if that does not help.
    """
    faults: dict[str, str] = {}
    while True:
        try:
            return Settings.load(), faults
        except errors.SettingsError as error:
            found = re.search(rf"{PREFIX}\w+", str(error))  # of several, those behind it are told next
            name = found[0] if found else "it"
            faults[name] = str(error).split(f"; {PREFIX}")[0]
            if os.environ.pop(name, None) is None:
                return None, faults


def _server(session: commands.Session, named: bool, place: Path | None) -> Area:
    def check() -> Iterator[Finding]:
        # Whoever names another server has not its variables there.
        own = place.parent if place and session.url == os.environ.get(URL_VARIABLE) else None
        with session.connect(1.0, read_seconds=10.0, on_retry=lambda reason: None) as api:
            yield from doctor_server.check(api, named, session.api_key, own)

    return Area("server", check, _SECONDS)


def _served(settings: Settings, given: Iterable[str]) -> dict[str, str]:
    """Return LONGHAUL_MODELS with the models that were given besides, for the process that looks at them."""
    models = dict(settings.models)
    for text in given:
        name, _, source = text.partition("=")
        if text not in models:
            models[name] = ModelSettings(source=source or name)
    if not models:
        return {}
    dumped = {name: model.model_dump(exclude_defaults=True, mode="json") for name, model in models.items()}
    return {"LONGHAUL_MODELS": orjson.dumps(dumped).decode()}


@contextmanager
def _environment(directory: Path | None) -> Iterator[Path | None]:
    """Have the variables of a running stack for a while; yield the file that they are from, if any.

    What is changed of them meanwhile is as before at the end.
    """
    before = dict(os.environ)
    try:
        yield _lent(directory)
    finally:
        _restore(before)


def _lent(directory: Path | None) -> Path | None:
    path = (directory or hints.DIRECTORY) / hints.ENVIRONMENT
    told = any(name.startswith(PREFIX) and name not in CLIENT_VARIABLES for name in os.environ)
    if directory is None and (told or not path.is_file()):
        return None
    if not path.is_file():
        raise errors.SettingsError(f"There is no {path}: no 'longhaul up' runs there.")
    os.environ.update(named_store.left_in(path))
    masking.learn_environment()
    return path


def _restore(before: Mapping[str, str]) -> None:
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def _print(finding: Finding, as_json: bool) -> None:
    told = finding.json()
    if as_json:
        click.echo(orjson.dumps(told))
        return
    mark = f"{_MARKS[finding.state]:<11}"
    mark = mark if terminal.is_plain() else click.style(mark, fg=_COLOURS[finding.state])
    said, advice = (
        values.printable(words)
        for words in (f"{told['area']}, {told['name']}: {told['said']}", told["advice"])
    )
    click.echo(f"{mark}  {said}")
    if advice:
        click.echo(f"{'':<11}  -> {advice}")
