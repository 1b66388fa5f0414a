"""What to type next, in the same words wherever a command says it."""

import shlex
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(".longhaul")
"""Where `longhaul up` keeps its data unless it is told otherwise."""
ENVIRONMENT = "environment"
"""The file in it that has the settings of a running one."""
_WORKER = "celery -A worker worker"


def variables(directory: Path = DIRECTORY) -> str:
    """Return the line that gives a shell the settings of the 'longhaul up' that runs in a directory."""
    return f"set -a; . {shlex.quote(str(directory / ENVIRONMENT))}; set +a"


def worker(directory: Path, models: Sequence[str], model: str | None = None) -> str:
    """Return the line that starts a worker of the 'longhaul up' in a directory, which serves `models`.

    model   its LONGHAUL_MODEL, if the file of the settings has one
    """
    # Without it, a worker would not know which of several to run.
    several = "LONGHAUL_MODEL=all " if model is None and len(models) > 1 else ""
    return f"{variables(directory)}; {several}{_WORKER}"


START_A_WORKER = (
    f"start one on a GPU node, with the server's LONGHAUL_ variables: {_WORKER} "
    f"(the variables of a 'longhaul up': {variables()})"
)
"""The same where nobody knows the directory, or there is none."""
