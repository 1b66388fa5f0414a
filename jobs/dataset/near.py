"""Find outputs that came before: the same, or nearly the same. The first one in input order is kept.

What was seen is kept in a database in the scratch directory, made anew for each run, so that memory is flat.
"""

import hashlib
import struct
import unicodedata
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import datasketch
import numpy as np

from jobs import errors, scratch
from jobs.dataset import shingles

_PERMUTATIONS = 128
_WEIGHTS = (0.05, 0.95)
"""A miss costs more than a candidate, since each candidate is compared."""
_MOST = 0.95
"""Above it there would be a single band."""
_AT_ONCE = 256
"""Shingles sketched at a time: their numbers stay in the processor's cache."""
_FROM_BAND = 64
_COMPARED = 16
_SLACK = 0.1
"""How far a sketch may be below the threshold: 3 in 1,000 pairs at 0.8 are estimated to be further below."""

Sketch = np.ndarray[Any, np.dtype[np.uint32]]


class BadThreshold(errors.LonghaulError):
    """A near-duplicate threshold of {threshold} is not above 0 and up to 1: 0.8 is usual."""


class Exact:
    """Finds texts that are the same.

    The same are texts that differ only in white space at the ends of lines and of the text, in line ends, and
    in how Unicode composes characters (NFC). Indentation, case and punctuation make a difference. Two texts
    that are not the same pass for it with a probability of 2**-128.
    """

    def __init__(self, directory: Path) -> None:
        self._scratch = scratch.Scratch(
            directory, "CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_new(self, text: str) -> bool:
        """Tell whether a text is the first of its kind, and remember it."""
        digest = hashlib.blake2b(_encoded(_plain(text)), digest_size=16).digest()
        return self._scratch.db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def close(self) -> None:
        """Forget everything."""
        self._scratch.__exit__(None, None, None)


class Near:
    """Finds texts that have at least `threshold` of their shingles in common (Jaccard; `shingles.of`).

    MinHash and locality-sensitive hashing (Broder 1997; Leskovec, Rajaraman and Ullman, chapter 3) find
    candidates: at a threshold of 0.8, 95 % of the pairs just there, and 99 % of those at 0.85. The likeliest
    16 are compared shingle by shingle, so what is below the threshold is never taken for a duplicate.
    Raises BadThreshold.
    """

    def __init__(self, directory: Path, threshold: float = 0.8) -> None:
        if not 0 < threshold <= 1:
            raise BadThreshold(threshold=threshold)
        self._threshold = threshold
        index = datasketch.MinHashLSH(min(threshold, _MOST), _PERMUTATIONS, weights=_WEIGHTS)
        self._bands, self._width = index.b, index.r
        self._empty = datasketch.MinHash(_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine32")
        self._scratch = scratch.Scratch(
            directory,
            "CREATE TABLE texts (id INTEGER PRIMARY KEY, sketch BLOB, text BLOB);"
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
        sketch = self._sketch(found)
        keys = self._keys(sketch)
        for number in self._candidates(sketch, keys):
            if shingles.jaccard(found, shingles.of(self._text(number))) >= self._threshold:
                return False
        self._keep(text, sketch, keys)
        return True

    def close(self) -> None:
        """Forget everything."""
        self._scratch.__exit__(None, None, None)

    def _sketch(self, found: shingles.Shingles) -> Sketch:
        sketch = self._empty.copy()
        for start in range(0, len(found), _AT_ONCE):
            sketch.update_batch((found[start : start + _AT_ONCE] & np.uint64(0xFFFFFFFF)).tolist())
        values: Sketch = sketch.hashvalues.astype("<u4")
        return values

    def _keys(self, sketch: Sketch) -> list[int]:
        """Return a number of 64 bits for each band of a sketch."""
        bands = sketch[: self._bands * self._width].reshape(self._bands, self._width)
        packed = (bytes([number]) + band.tobytes() for number, band in enumerate(bands))
        return [struct.unpack("<q", hashlib.blake2b(band, digest_size=8).digest())[0] for band in packed]

    def _candidates(self, sketch: Sketch, keys: list[int]) -> Iterator[int]:
        """Yield kept texts that share a band with this one, the likeliest first."""
        ids = self._sharing(keys)
        if not ids:
            return
        wanted = f"SELECT id, sketch FROM texts WHERE id IN ({','.join(map(str, ids))})"
        numbers, packed = zip(*self._scratch.db.execute(wanted), strict=True)
        sketches = np.frombuffer(b"".join(packed), "<u4").reshape(len(numbers), -1)
        likeness = (sketches == sketch).mean(axis=1)
        for place in np.argsort(-likeness, kind="stable")[:_COMPARED]:
            if likeness[place] >= self._threshold - _SLACK:
                yield numbers[place]

    def _sharing(self, keys: list[int]) -> set[int]:
        """Return kept texts that share a band: the first 64 of each, since many are no sign."""
        query = "SELECT id FROM bands WHERE key = ? ORDER BY id LIMIT ?"
        return {row[0] for key in keys for row in self._scratch.db.execute(query, (key, _FROM_BAND))}

    def _text(self, number: int) -> str:
        row = self._scratch.db.execute("SELECT text FROM texts WHERE id = ?", (number,)).fetchone()
        return zlib.decompress(row[0]).decode("utf-8", "surrogatepass")

    def _keep(self, text: str, sketch: Sketch, keys: list[int]) -> None:
        packed = zlib.compress(_encoded(text), 1)
        self._scratch.db.execute("INSERT INTO texts VALUES (?, ?, ?)", (self._kept, sketch.tobytes(), packed))
        self._scratch.db.executemany("INSERT INTO bands VALUES (?, ?)", [(key, self._kept) for key in keys])
        self._kept += 1


def _plain(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).strip().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
