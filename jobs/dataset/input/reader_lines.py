"""What files of text have in common: records that are read line by line, bad ones told of and passed over."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any

import pyarrow as pa

from jobs.dataset.input import places, rows, text_lines


class LineReader(ABC):
    """Reads a file of text, plain or compressed. `count` is known once it has been read to its end."""

    schema: pa.Schema

    def __init__(self, file: places.File) -> None:
        self.shown = file.shown
        self.count: int | None = None
        self._file = file
        self._marks = text_lines.Marks()
        text_lines.check_text(file)

    def read(self, schema: pa.Schema, start: int, on_fault: rows.OnFault) -> Generator[rows.Rows, None, int]:
        """Read it, as rows.Reader says."""

        def bad(position: int, line: int, message: str) -> None:
            on_fault(rows.Fault(start + position, f"{self.shown} line {line}", message))

        for positions, values in text_lines.batches(self._records(bad)):
            yield rows.Rows(rows.numbers([start + at for at in positions]), self._batch(values, schema))
        return start + (self.count or 0)

    def place(self, position: int) -> str:
        """Return where a row was, as rows.Reader says."""
        return self._marks.place(position)

    @abstractmethod
    def _records(self, bad: text_lines.OnBad) -> Iterator[text_lines.Record]:
        """Yield what can be read; tell of the rest, and set `count` at the end."""

    @abstractmethod
    def _batch(self, values: list[Any], schema: pa.Schema) -> pa.RecordBatch:
        """Return records as columns."""
