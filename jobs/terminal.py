"""What whoever reads can see: a terminal or not, its width, and whether it wants colour. One rule for all."""

import os
import sys
from typing import IO, Any

from rich import console


def is_terminal(stream: IO[Any] | None) -> bool:
    """Tell whether a stream is one; None is one that whoever began this process had closed."""
    return stream is not None and stream.isatty()


def is_plain() -> bool:
    """Tell whether the environment asks for text without colour: by NO_COLOR, or a terminal that is dumb."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def is_lively(stream: IO[Any] | None) -> bool:
    """Tell whether something may move and be coloured there."""
    return is_terminal(stream) and not is_plain()


def width(elsewhere: int | None = None) -> int | None:
    """Return how many columns there are on standard output; `elsewhere` where it is no terminal."""
    known = is_terminal(sys.stdout) or "COLUMNS" in os.environ
    return console.Console().width if known else elsewhere


def printer(width: int | None = None, **options: Any) -> console.Console:
    """Return what prints tables: without any escape sequence where none is wanted."""
    return console.Console(
        width=width, highlight=False, color_system=None if is_plain() else "auto", **options
    )
