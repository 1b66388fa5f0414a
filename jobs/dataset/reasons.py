"""Why rows failed and outputs are not valid: each reason with its count and its first place."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pyarrow import parquet

from jobs.dataset.output import apart

OTHERS = "others"
MOST = 100
"""Different reasons that are counted one by one."""
_CHARACTERS = 200
_VARYING = re.compile(r"(?<!\w)'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+")
"""What the same reason has otherwise in each row: values and positions."""


@dataclass
class Reason:
    """`code` as in errors.parquet, or `invalid`; `message` and `place` are those of the first one."""

    code: str
    message: str
    count: int
    place: str


class Reasons:
    """Counts reasons in little memory: from the 101st on they are `others`."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Reason] = {}
        self._others = Reason(OTHERS, "", 0, "")

    def add(self, code: str, message: str, place: str) -> None:
        """Count one; messages that differ in values and numbers alone are the same."""
        short = " ".join(message[: 2 * _CHARACTERS].split())[:_CHARACTERS]
        key = (code, _VARYING.sub("", short))
        known = self._found.get(key)
        if known is None and len(self._found) < MOST:
            known = self._found[key] = Reason(code, short, 0, place)
        known = known or self._others
        known.count += 1
        known.place = known.place or place

    def told(self) -> list[Reason]:
        """Return them, the commonest first, the others last."""
        found = sorted(self._found.values(), key=lambda reason: -reason.count)
        return found + ([self._others] if self._others.count else [])


def read(directory: Path) -> list[Reason]:
    """Return the reasons in what a run has put apart, in errors.parquet and invalid.parquet."""
    found = Reasons()
    for code, message, place in _said(directory):
        found.add(code, message, place)
    return found.told()


def _said(directory: Path) -> Iterator[tuple[str, str, str]]:
    for name, columns in ((apart.ERRORS, ["code", "message"]), (apart.INVALID, ["error"])):
        path = directory / f"{name}.parquet"
        if not path.exists():
            continue
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1000, columns=[*columns, "place"]):
                *codes, messages, places = (batch[column].to_pylist() for column in [*columns, "place"])
                yield from zip(codes[0] if codes else [name] * len(places), messages, places, strict=True)
