"""Places for output: which files a job's results lie in, and whether they can be written."""

import tempfile
from pathlib import Path

from jobs import errors


class CannotWrite(errors.InvalidRequest):
    """{path} cannot be written: no file can be made in {directory} ({reason}). Name another with {option}."""


def of_job(output: Path) -> dict[str, Path]:
    """Return where each kind of a job's files lies: output, and `out.errors.jsonl` beside `out.jsonl`."""
    others = {"errors": "jsonl", "metrics": "jsonl", "summary": "json"}
    return {"output": output} | {
        kind: output.with_name(f"{output.stem}.{kind}.{suffix}") for kind, suffix in others.items()
    }


def check(path: Path, option: str = "-o") -> None:
    """Refuse a file or a directory that could not be made, with the directories on the way to it.

    It is asked before anything is loaded or computed. Nothing is left behind. Raises CannotWrite.
    """
    directory = path
    try:
        directory = _existing(path.resolve())
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".longhaul-"):
            pass
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        reason = getattr(error, "strerror", None) or str(error)
        raise CannotWrite(path=path, directory=directory, reason=reason, option=option) from None


def _existing(path: Path) -> Path:
    """Return the directory in which the first thing would be made on the way to a path."""
    if path.is_dir():
        return path
    return next(parent for parent in path.parents if parent.exists())
