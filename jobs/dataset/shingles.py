"""Texts as sets of shingles, for telling how much two texts have in common.

A shingle is five characters in a row, or three that begin with a Chinese, Japanese or Korean one, whose
characters say more. Case, width and the kind of white space make no difference.
"""

import unicodedata
from typing import Any

import numpy as np

_LONG, _SHORT = 5, 3
_DENSE = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xAC00, 0xD7AF), (0x20000, 0x3FFFF))
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Shingles = np.ndarray[Any, np.dtype[np.uint64]]
"""Sorted hashes of 64 bits, each once."""


def of(text: str) -> Shingles:
    """Return the shingles of a text; a text that is shorter than one has one."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    codes = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.uint64)
    if len(codes) < _LONG:  # shorter than a shingle: filled up with what no text has
        codes = np.append(codes, np.full(_LONG - len(codes), 0x110000, np.uint64))
    short, long = _rolled(codes, _SHORT), _rolled(codes, _LONG)
    dense = _dense(codes)
    hashes = np.where(dense[: len(long)], short[: len(long)], long)
    tail = short[len(long) :][dense[len(long) : len(short)]]
    return _once(_mixed(np.concatenate([hashes, tail])))


def jaccard(one: Shingles, other: Shingles) -> float:
    """Return the share of shingles that both have of those that either has."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)


def _rolled(codes: Shingles, width: int) -> Shingles:
    """Return a number for each run of `width` characters; the width is part of it."""
    count = len(codes) - width + 1
    hashes = np.full(count, width, np.uint64)
    for offset in range(width):
        hashes = (hashes * _FACTOR) ^ codes[offset : offset + count]
    return hashes


def _dense(codes: Shingles) -> np.ndarray[Any, np.dtype[np.bool_]]:
    found = np.zeros(len(codes), np.bool_)
    for first, last in _DENSE:
        found |= (codes >= first) & (codes <= last)
    return found


def _once(hashes: Shingles) -> Shingles:
    hashes.sort()
    once: Shingles = hashes[np.append(True, hashes[1:] != hashes[:-1])]
    return once


def _mixed(hashes: Shingles) -> Shingles:
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _FACTOR
    mixed: Shingles = hashes ^ (hashes >> np.uint64(32))
    return mixed
