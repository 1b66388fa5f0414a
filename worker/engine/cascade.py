"""Which pages are read once for several rows of a step: runs of pages that begin their tables alike.

Hydragen (Juravsky et al. 2024) and FlashInfer's cascades (Ye et al. 2025) do so for one and for more levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.int32]
LEAST_SAVED_PAGES = 4
"""Reading fewer pages less is not worth a row more, and a merge."""
_MOST_PIECES = 16
_PIECE_QUERIES = 1024
"""So many queries of a segment, all pieces together, fill a GPU: each piece has a copy of them."""
_LEAST_PIECE_PAGES = 4


@dataclass(frozen=True)
class Segment:
    """Pages `first` to `last` of the tables of `rows`, which are the same in all of these."""

    rows: list[int]
    first: int
    last: int

    def pieces(self, queries: int) -> "list[Segment]":
        """Return it in pieces that a GPU reads side by side, if its rows have so few queries that one does
        not fill it.
        """
        pages = self.last - self.first
        most = min(_MOST_PIECES, max(1, _PIECE_QUERIES // queries))
        size = max(_LEAST_PIECE_PAGES, -(-pages // most))
        return [
            Segment(self.rows, at, min(at + size, self.last)) for at in range(self.first, self.last, size)
        ]


def plan(tables: Sequence[Table], least_saved: int = LEAST_SAVED_PAGES) -> list[Segment]:
    """Return the segments of rows by what may be shared of their tables: parents before children, and of each
    row from its first page on without a gap.
    """
    order = sorted(range(len(tables)), key=lambda row: tables[row].astype(">i4").tobytes())
    return _below(tables, order, 0, least_saved)


def starts(segments: Sequence[Segment], rows: int) -> list[int]:
    """Return how many pages each row has in segments."""
    found = [0] * rows
    for segment in segments:
        for row in segment.rows:
            found[row] = segment.last
    return found


def _below(tables: Sequence[Table], rows: list[int], first: int, least_saved: int) -> list[Segment]:
    """Return the segments of sorted rows that are alike before page `first`."""
    longer = [row for row in rows if len(tables[row]) > first]
    found: list[Segment] = []
    for _, same in groupby(longer, key=lambda row: int(tables[row][first])):
        group = list(same)
        if len(group) < 2:
            continue
        last = _alike(tables[group[0]], tables[group[-1]], first)
        deeper = _below(tables, group, last, least_saved)
        if deeper or (len(group) - 1) * (last - first) >= least_saved:
            found += [Segment(group, first, last), *deeper]
    return found


def _alike(a: Table, b: Table, first: int) -> int:
    """Return up to where two tables are the same from `first` on."""
    length = min(len(a), len(b))
    differs = (a[first:length] != b[first:length]).nonzero()[0]
    return first + int(differs[0]) if len(differs) else length
