"""CSV and TSV files with a header. Every column is text as it stands (007 stays 007), an empty field null."""

import csv
from collections.abc import Iterator

import pyarrow as pa

from jobs.dataset.input import input_errors, json_types, places, reader_lines, text_lines

_LONGEST_FIELD = 16 << 20
_OTHERS = {
    "\t": "tabs; rename it to .tsv",
    ";": "semicolons; convert it to commas, or to Parquet as docs/datasets.md shows",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}


class Reader(reader_lines.LineReader):
    """Reads a file of comma- or tab-separated records, plain or compressed; fields may be quoted with "."""

    def __init__(self, file: places.File) -> None:
        super().__init__(file)
        self._header = self._read_header()
        self.schema = pa.schema([(name, json_types.TEXT) for name in self._header])

    def _batch(self, values: list[list[str]], schema: pa.Schema) -> pa.RecordBatch:
        columns = []
        for field in schema:
            at = self._header.index(field.name) if field.name in self._header else None
            column = [None if at is None else value[at] or None for value in values]
            columns.append(pa.array(column, json_types.TEXT))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _records(self, bad: text_lines.OnBad) -> Iterator[text_lines.Record]:
        position, text = -1, _Text(self._file)
        for line, record, problem in _parsed(text, _DELIMITERS[self._file.kind]):
            if position < 0 and problem is None:  # the header
                position = 0
                continue
            self._marks.note(position, line)
            problem = problem or self._wrong_width(record)
            if problem is None:
                yield position, record, sum(map(len, record))
            else:
                bad(position, line, problem)
            position += 1
        self.count = position

    def _wrong_width(self, record: list[str]) -> str | None:
        if len(record) == len(self._header):
            return None
        return f"it has {len(record)} fields, the header has {len(self._header)}"

    def _read_header(self) -> list[str]:
        records = _parsed(_Text(self._file), _DELIMITERS[self._file.kind])
        line, header, problem = next(records, (1, [], None))
        if problem is not None:
            raise input_errors.InputUnreadable(where=f"{self.shown} line {line}", reason=problem)
        for name in header:
            if header.count(name) > 1:
                raise input_errors.ColumnTwice(where=self.shown, name=name)
        self._check_separator(header)
        if next(records, None) is None:
            self.count = 0
        return header

    def _check_separator(self, header: list[str]) -> None:
        """Refuse what would be one column with all the others in its name."""
        for separator, advice in _OTHERS.items() if self._file.kind == "csv" and len(header) == 1 else ():
            if separator in header[0]:
                raise input_errors.InputUnreadable(
                    where=self.shown, reason=f"its header has no comma, but {advice}"
                )


class _Text:
    """The lines of a file for the csv module; `problem` is what was wrong with one since it was reset."""

    def __init__(self, file: places.File) -> None:
        self._lines = text_lines.lines(file)
        self.number = 0
        self.problem: str | None = None

    def __iter__(self) -> "_Text":
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        if line is None:
            self.problem = f"the line has more than {text_lines.LONGEST >> 20} MiB"
            return "\n"
        try:
            return line.decode() + "\n"
        except UnicodeDecodeError as error:
            self.problem = f"not UTF-8: {error}"
            return line.decode(errors="replace") + "\n"


def _parsed(text: _Text, delimiter: str) -> Iterator[tuple[int, list[str], str | None]]:
    """Yield each record with its first line and what is wrong with it; blank lines are none."""
    csv.field_size_limit(_LONGEST_FIELD)
    parser = csv.reader(text, delimiter=delimiter, strict=True)
    while True:
        line, text.problem, record = text.number + 1, None, []
        try:
            record = next(parser)
        except StopIteration:
            return
        except csv.Error as error:
            text.problem = text.problem or str(error)
        except text_lines.CutShort as error:
            yield line, [], f"the file breaks off here, what follows is lost: {error}"
            return
        if record or text.problem:
            yield line, record, text.problem
