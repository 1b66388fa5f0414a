"""Makes the table of docs/faults.md from a report of rounds: `python -m tests.chaos.table REPORT`."""

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import orjson

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
BEGIN = "<!-- made by `make chaos` -->"
HEAD = [
    "| fault | rounds | rows | lost | doubled | computed again | seconds to recover: median | worst |",
    "|---|--:|--:|--:|--:|--:|--:|--:|",
]


def table(rounds: Iterable[dict[str, object]]) -> str:
    """Return the table of these rounds, faults in alphabetical order."""
    by_fault: dict[str, list[dict[str, object]]] = {}
    for one in rounds:
        by_fault.setdefault(str(one["fault"]), []).append(one)
    return "\n".join([*HEAD, *(_line(fault, by_fault[fault]) for fault in sorted(by_fault, key=str.lower))])


def _line(fault: str, rounds: list[dict[str, object]]) -> str:
    sums = [sum(int(str(one[name])) for one in rounds) for name in ("rows", "lost", "doubled", "recomputed")]
    seconds = [float(str(one["seconds"])) for one in rounds]
    cells = [fault, len(rounds), *sums, f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Put the table of a report into the page, behind its marker."""
    rounds = [orjson.loads(line) for line in Path(sys.argv[1]).read_bytes().splitlines()]
    text, marker, _ = PAGE.read_text().partition(BEGIN)
    if not marker:
        sys.exit(f"{PAGE} has no line {BEGIN!r}")
    PAGE.write_text(f"{text}{BEGIN}\n\n{table(rounds)}\n")


if __name__ == "__main__":
    main()
