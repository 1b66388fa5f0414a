"""Find outputs that came before: the same, or nearly the same. The first one in input order is kept.

What was seen is kept in a database in the scratch directory, made anew for each run, so that memory is flat.
"""

import hashlib
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import datasketch
import numpy as np

from jobs import errors, scratch
from jobs.dataset import shingles

_SKETCH = 128
_MISSES_COST = (0.05, 0.95)
"""Few misses matter more than few candidates, since each candidate is compared."""
_AT_ONCE = 4096
_MOST_CANDIDATES = 64


class BadThreshold(errors.LonghaulError):
    """A near-duplicate threshold of {threshold} is not above 0 and up to 1: 0.8 is usual."""


class Exact:
    """Finds texts that are the same.

    The same are texts that differ only in white space at the ends of lines and of the text, in line ends, and in
    how Unicode composes characters (NFC). Indentation, case and punctuation make a difference. Two texts that
    are not the same pass for it with a probability of 2**-128.
    """

    def __init__(self, directory: Path) -> None:
        self._scratch = scratch.Scratch(directory, "CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_new(self, text: str) -> bool:
        """Tell whether a text is the first of its kind, and remember it."""
        digest = hashlib.blake2b(_plain(text).encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return self._scratch.db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        """Forget everything."""
        self._scratch.__exit__(None, None, None)


class Near:
    """Finds texts that have at least `threshold` of their shingles (`shingles.of`) in common: Jaccard's index.

    MinHash and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and Ullman, chapter 3) find
    candidates: at 0.8, 95 % of the pairs that are just at the threshold and 99 % of those at 0.85. Each is then
    compared shingle by shingle, so nothing below the threshold is taken for a duplicate. For each band the
    64 earliest candidates are looked at. Raises BadThreshold.
    """

    def __init__(self, directory: Path, threshold: float = 0.8) -> None:
        if not 0 < threshold <= 1:
            raise BadThreshold(threshold=threshold)
        self._threshold = threshold
        index = datasketch.MinHashLSH(threshold, _SKETCH, weights=_MISSES_COST)
        self._bands, self._width = index.b, index.r
        self._empty = datasketch.MinHash(_SKETCH, seed=1, hashfunc=int, scheme="affine32")
        self._scratch = scratch.Scratch(
            directory,
            "CREATE TABLE texts (id INTEGER PRIMARY KEY, size INTEGER, text BLOB);"
            "CREATE TABLE bands (key INTEGER, id INTEGER, PRIMARY KEY (key, id)) WITHOUT ROWID",
        )
        self._kept = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_new(self, text: str) -> bool:
        """Tell whether a text is like none that was kept, and if so keep it."""
        found = shingles.of(text)
        keys = self._keys(found)
        if any(shingles.jaccard(found, other) >= self._threshold for other in self._candidates(keys, len(found))):
            return False
        self._keep(text, len(found), keys)
        return True

    def close(self) -> None:
        """Forget everything."""
        self._scratch.__exit__(None, None, None)

    def _keys(self, found: shingles.Shingles) -> list[int]:
        """Return a number of 64 bits for each band of the text's sketch."""
        sketch = self._empty.copy()
        for start in range(0, len(found), _AT_ONCE):
            sketch.update_batch((found[start : start + _AT_ONCE] & np.uint64(0xFFFFFFFF)).tolist())
        values = sketch.hashvalues[: self._bands * self._width].astype("<u4").reshape(self._bands, self._width)
        digests = (
            hashlib.blake2b(bytes([band]) + row.tobytes(), digest_size=8) for band, row in enumerate(values)
        )
        return [struct.unpack("<q", digest.digest())[0] for digest in digests]

    def _candidates(self, keys: list[int], size: int) -> Iterator[shingles.Shingles]:
        """Yield the shingles of kept texts that share a band with these and are not too short or too long."""
        ids: set[int] = set()
        for key in keys:
            rows = self._scratch.db.execute(
                "SELECT id FROM bands WHERE key = ? ORDER BY id LIMIT ?", (key, _MOST_CANDIDATES)
            )
            ids.update(row[0] for row in rows)
        for number in sorted(ids):
            row = self._scratch.db.execute("SELECT size, text FROM texts WHERE id = ?", (number,)).fetchone()
            if min(size, row[0]) >= self._threshold * max(size, row[0]):
                yield shingles.of(zlib.decompress(row[1]).decode("utf-8", "surrogatepass"))

    def _keep(self, text: str, size: int, keys: list[int]) -> None:
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
        self._scratch.db.execute("INSERT INTO texts VALUES (?, ?, ?)", (self._kept, size, packed))
        self._scratch.db.executemany("INSERT INTO bands VALUES (?, ?)", [(key, self._kept) for key in keys])
        self._kept += 1


def _plain(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines)
