"""Which store a command means that works on a server's store itself."""

import os
import shlex
from pathlib import Path

import click

from jobs import errors, hints
from jobs.settings import PREFIX, Settings

_VARIABLE = "LONGHAUL_STORE_URL"
_FIELDS = ("store_url", *(name for name in Settings.model_fields if name.startswith("s3_")))


def require() -> None:
    """Refuse to go on where nothing says which store is meant.

    A server has a default. A command that took it would make, or work on, a store that no server uses.
    """
    if _VARIABLE not in os.environ:
        advice = f"Set it as the server has it; of a running 'longhaul up': {hints.variables()}"
        raise click.UsageError(f"{_VARIABLE} is not set. {advice}")


def settings(directory: Path | None) -> Settings:
    """Return settings with the store of the 'longhaul up' that runs in a directory; None: that of the
    variables, which must name one.
    """
    if directory is not None:
        return Settings.load(**_store_of(left_in(directory / hints.ENVIRONMENT)))
    if _VARIABLE not in os.environ:
        if (hints.DIRECTORY / hints.ENVIRONMENT).exists():
            raise click.UsageError(
                f"A 'longhaul up' runs here. For its store say --dir {hints.DIRECTORY}; "
                f"for another one set {_VARIABLE}."
            )
        raise click.UsageError(f"{_VARIABLE} is not set. Say --dir of a running 'longhaul up', or set it.")
    return Settings.load()


def left_in(path: Path) -> dict[str, str]:
    """Return the variables that a running 'longhaul up' keeps in a file; raises SettingsError."""
    try:
        pairs = [word.partition("=") for word in shlex.split(path.read_text())]
    except FileNotFoundError:
        raise errors.SettingsError(f"There is no {path}: no 'longhaul up' runs there.") from None
    except ValueError:  # quotes that do not end, bytes that are no text
        pairs = [("", "", "")]
    if not all(name.isidentifier() and equals for name, equals, _ in pairs):
        raise errors.SettingsError(f"{path} is not what 'longhaul up' writes: start it again.")
    return {name: value for name, _, value in pairs}


def _store_of(variables: dict[str, str]) -> dict[str, str]:
    """Return what tells the store, as fields of the settings."""
    found = {name.removeprefix(PREFIX).lower(): value for name, value in variables.items()}
    return {name: found[name] for name in _FIELDS if name in found}
