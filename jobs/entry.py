"""Where the `longhaul` command begins: Ctrl-C is quiet even while the rest is imported."""

import io
import sys
from typing import TextIO


def main() -> None:
    """Run the command line."""
    try:
        bear_any_text(sys.stdout)
        bear_any_text(sys.stderr)
        from jobs import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


def bear_any_text(stream: TextIO | None) -> None:
    """Have a stream show a question mark for what its encoding lacks, where it would raise."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
