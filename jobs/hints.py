"""What to type next, in the same words wherever a command says it."""

import shlex
from pathlib import Path

DIRECTORY = Path(".longhaul")
"""Where `longhaul up` keeps its data unless it is told otherwise."""
ENVIRONMENT = "environment"
"""The file in it that has the settings of a running one."""
_WORKER = "celery -A worker worker"


def variables(directory: Path = DIRECTORY) -> str:
    """Return the line that gives a shell the settings of the 'longhaul up' that runs in a directory."""
    return f"set -a; . {shlex.quote(str(directory / ENVIRONMENT))}; set +a"


def worker(model: str | None = None, directory: Path | None = None) -> str:
    """Return how to start a worker, to stand behind "start one: ".

    model       its LONGHAUL_MODEL: where several are served, it must be told
    directory   that of a running 'longhaul up'; None: whoever says this does not know where the server's
                variables are
    """
    command = with_model(_WORKER, model)
    if directory is not None:
        return f"{variables(directory)}; {command}"
    # The command comes first: a narrow terminal cuts the rest.
    where = "on a GPU node with the server's LONGHAUL_ variables"
    return f"'{command}' {where} (of a 'longhaul up': {variables()})"


def with_model(command: str, model: str | None) -> str:
    """Return a command with its LONGHAUL_MODEL before it."""
    return f"LONGHAUL_MODEL={shlex.quote(model)} {command}" if model else command


def any_of(served: int) -> str | None:
    """Return the LONGHAUL_MODEL of a worker that runs all of so many models; of one it needs none."""
    return "all" if served > 1 else None
