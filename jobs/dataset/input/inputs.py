"""Everything an input consists of: a reader for each file, and the columns of all of them together."""

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs.dataset.input import input_errors, json_types, places, reader_arrow, reader_csv, reader_json, rows

_READERS: dict[str, Callable[[places.File], rows.Reader]] = {
    "parquet": reader_arrow.Parquet,
    "arrow": reader_arrow.Arrow,
    "csv": reader_csv.Reader,
    "tsv": reader_csv.Reader,
    "jsonl": reader_json.Reader,
}


@dataclass(frozen=True)
class Input:
    """Readers in the order of their rows, the union of their columns, and what tells of a change."""

    readers: list[rows.Reader]
    schema: pa.Schema
    identity: dict[str, Any]
    files: Sequence[places.File] = ()


def opened(place: Any, scratch: Path | None, outputs: Sequence[Path] = ()) -> Input:
    """Return what a place consists of, but for files in `outputs`. Raises InputError."""
    if isinstance(place, str | os.PathLike):
        shown, files = os.fspath(place), places.find(os.fspath(place), outputs)
        identity: dict[str, Any] = {"files": [[file.shown, file.size, file.mtime_ns] for file in files]}
        found = [_READERS[file.kind](file) for file in files]
    else:
        shown, files, found = "the table", [], [_in_memory(place, scratch)]
        identity = {"rows": found[0].count}
    schema = _union(found)
    if all(reader.count == 0 for reader in found) or not schema.names:
        raise input_errors.InputEmpty(place=shown, what="no rows" if schema.names else "no columns")
    return Input(found, schema, identity, files)


def _in_memory(place: Any, scratch: Path | None) -> rows.Reader:
    if isinstance(place, list):
        return reader_arrow.Table(_table(place))
    if isinstance(place, pa.Table):
        return reader_arrow.Table(place)
    if hasattr(place, "__arrow_c_stream__"):
        return _Copied(pa.RecordBatchReader.from_stream(place), scratch)
    raise input_errors.InputError(
        f"{type(place).__name__} is no input: give a path, a table of pyarrow, or a list of dicts."
    )


def _table(records: list[dict[str, Any]]) -> pa.Table:
    """Return dicts as a table, with the columns that a file of them would have."""
    if not records:
        raise input_errors.InputEmpty(place="the list", what="no rows")
    for at, record in enumerate(records):
        if not isinstance(record, dict):
            raise input_errors.RowNoDict(at=at, type=type(record).__name__)
    names = dict.fromkeys(name for record in records for name in record)
    values = {name: [record.get(name) for record in records] for name in names}
    types = {name: json_types.storable(json_types.of(column)) for name, column in values.items()}
    return pa.table({name: json_types.array(column, types[name]) for name, column in values.items()})


class _Copied(reader_arrow.Arrow):
    """Reads what can be read only once, from a copy that is removed with this object."""

    def __init__(self, batches: pa.RecordBatchReader, scratch: Path | None) -> None:
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix="longhaul-input-", suffix=".arrow", dir=scratch)
        weakref.finalize(self, os.unlink, path)
        with os.fdopen(handle, "wb") as file, pa.ipc.new_stream(file, batches.schema) as out:
            for batch in batches:
                out.write_batch(batch)
        super().__init__(places.find(path)[0])
        self.shown = reader_arrow.Table.shown


def _union(readers: list[rows.Reader]) -> pa.Schema:
    types: dict[str, pa.DataType] = {}
    first: dict[str, str] = {}
    for reader in readers:
        for field in reader.schema:
            known = types.setdefault(field.name, field.type)
            first.setdefault(field.name, reader.shown)
            if known != field.type:
                types[field.name] = _wider(field, known, first[field.name], reader)
    return pa.schema(list(types.items()))


def _wider(field: pa.Field, known: pa.DataType, first: str, reader: rows.Reader) -> pa.DataType:
    if isinstance(reader, reader_json.Reader):
        return json_types.merged(known, field.type)
    both = [pa.schema([(field.name, known)]), pa.schema([field])]
    try:
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except pa.ArrowException as error:
        raise input_errors.TypesDiffer(
            column=field.name, first=first, second=reader.shown, reason=error
        ) from None
