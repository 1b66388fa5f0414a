"""`longhaul generate` in a process that notes after each step how many tokens its engine has sampled.

FILE, then the command's arguments. Behind a kill the file tells what had been computed, kept or not.
"""

import os
import sys
from pathlib import Path
from typing import Any

from jobs import cli
from worker import engine


def main(place: str, *arguments: str) -> None:
    """Run the command."""
    opened = engine.open_engine

    def counting(*given: Any) -> engine.Engine:
        running = opened(*given)
        step = running.step

        def stepping() -> list[engine.Completion]:
            done = step()
            unfinished = Path(f"{place}.part")
            unfinished.write_text(str(running.stats.tokens_sampled))
            unfinished.replace(place)
            return done

        running.step = stepping  # type: ignore[method-assign]
        return running

    engine.open_engine = counting
    os.environ["NO_COLOR"] = "1"
    sys.argv = ["longhaul", *arguments]
    cli.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
