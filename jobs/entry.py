"""Where the `longhaul` command begins: Ctrl-C is quiet even while the rest is imported."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from jobs import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)
