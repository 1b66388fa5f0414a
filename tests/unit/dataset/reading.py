"""What the tests of the input share: reading a source to its end."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.dataset.input import source

Record = dict[str, Any]


def read(place: Any, **choice: Any) -> tuple[list[int], list[Record], list[source.Fault]]:
    """Return numbers, rows and faults of a new source."""
    return everything(source.open_source(place, **choice))


def everything(opened: source.Source) -> tuple[list[int], list[Record], list[source.Fault]]:
    numbers: list[int] = []
    records: list[Record] = []
    faults: list[source.Fault] = []
    for each in opened.rows(faults.append):
        assert each.batch.schema == opened.schema
        numbers += each.numbers.to_pylist()
        records += each.batch.to_pylist()
    return numbers, records, faults


def written(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def _arrow_codec(name: str) -> Callable[[bytes], bytes]:
    def compress(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, name) as out:
            out.write(data)
        return bytes(sink.getvalue())

    return compress


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _arrow_codec("zstd"),
    ".lz4": _arrow_codec("lz4"),
}
