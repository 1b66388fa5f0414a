"""The expression of --where: SQL over the columns of a row, and nothing but that."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from jobs.dataset.input import input_errors, rows

_LOCKED: dict[str, str | bool | int | float | list[str]] = {
    "threads": "1",
    "enable_external_access": "false",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "python_enable_replacements": "false",
    "lock_configuration": "true",
}
_KNOWN = {"COLUMN_REF", "CONSTANT", "FUNCTION", "COMPARISON", "CONJUNCTION", "CAST", "CASE", "BETWEEN"} | {
    "OPERATOR", "LAMBDA", "LAMBDA_REF", "COLLATE", "TYPE",
}  # fmt: skip
_SAID = {
    "SUBQUERY": "it may not have a query in it",
    "PARAMETER": "it may not have parameters",
    "STAR": "name the columns, * and COLUMNS() are not known here",
    "WINDOW": "it sees one row at a time, so it may not have window functions",
}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NO_REASON = "it cannot be evaluated for this row"
_MOST_REASONS = 100
"""Each takes a query of its own: so many are asked for in a table that is evaluated at once."""
_GATHER_ROWS = 8 * rows.BATCH_ROWS
_GATHER_BYTES = 2 * rows.BATCH_BYTES


class Where:
    """Decides which rows stay. `columns` are those it reads.

    The expression is parsed by DuckDB, checked to be one expression without queries, and run in a database
    without access to files, network or extensions. Raises WhereRefused.
    """

    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text, self._schema = text, schema
        if not text.strip():
            raise self._refused("it is empty")
        self._db = duckdb.connect(":memory:", config=_LOCKED)
        nodes = list(_nodes(self._parsed()))
        self._check_functions(nodes)
        self.columns = _columns(nodes, schema.names)
        self._bind(pa.schema([schema.field(name) for name in self.columns]), schema.names)

    def kept(
        self, batches: Iterator[rows.Rows], place: Callable[[int], str], on_fault: rows.OnFault
    ) -> Iterator[rows.Rows]:
        """Yield the rows for which the expression is true; those for which it fails are faults."""
        for some in _gathered(batches):
            table = self._table(some)
            try:
                keep = self._run(table, self._text)
            except duckdb.Error:
                keep = self._run(table, f"TRY({self._text}\n)")
                self._tell(some, table, place, on_fault)
            yield from _filtered(some, keep)

    def _parsed(self) -> Any:
        """Return the syntax tree of the expression, which must be the only thing in its query."""
        query = f"SELECT ({self._text}\n)"
        (tree,) = self._db.execute("SELECT json_serialize_sql(?::VARCHAR)", [query]).fetchall()[0]
        found = json.loads(tree)
        if found["error"]:
            raise self._refused(found["error_message"] + self._unquoted(found["error_message"]))
        nodes = [statement["node"] for statement in found["statements"]]
        if len(nodes) == 1 and nodes[0]["type"] == "SELECT_NODE":
            expression = nodes[0].pop("select_list")
            if len(expression) == 1 and nodes[0] == self._nothing_else():
                return expression[0]
        raise self._refused("it must be one expression over the columns of a row, such as len(text) < 2000")

    def _nothing_else(self) -> Any:
        (tree,) = self._db.execute("SELECT json_serialize_sql('SELECT (1)')").fetchall()[0]
        node = json.loads(tree)["statements"][0]["node"]
        del node["select_list"]
        return node

    def _check_functions(self, nodes: list[dict[str, Any]]) -> None:
        """Refuse what is no expression over one row, and what gives another value each time."""
        for node in nodes:
            if node["class"] not in _KNOWN:
                raise self._refused(
                    _SAID.get(node["class"], f"it may not have {node['class'].lower()} in it")
                )
        names = {node["function_name"].lower() for node in nodes if node["class"] == "FUNCTION"}
        listed = "SELECT DISTINCT function_name FROM duckdb_functions() WHERE stability = 'VOLATILE'"
        for (name,) in self._db.execute(listed).fetchall():
            if name in names:
                advice = "to take a part of the rows write hash(column) % 10 = 0"
                raise self._refused(f"{name}() gives another value each time; {advice}")

    def _bind(self, schema: pa.Schema, known: list[str]) -> None:
        query = f"SELECT ({self._text}\n) AS keep FROM rows WHERE ({self._text}\n)"
        try:
            self._db.register("rows", _with_some_column(schema.empty_table()))
            type = self._db.sql(query).types[0]
        except duckdb.Error as error:
            missing = re.search(r'Referenced column "(.*?)" not found', str(error))
            if missing is not None and missing[1] not in known and not (quote := self._unquoted()):
                raise input_errors.missing_column(missing[1], known) from None
            hint = quote if missing is not None else self._cast(str(error))
            raise self._refused(_first_line(error).rstrip(".!") + hint) from None
        if type != "BOOLEAN":
            raise self._refused(f"it gives {type}, not true or false")

    def _table(self, some: list[rows.Rows]) -> pa.Table:
        if not self.columns:
            return pa.table({"": pa.nulls(sum(len(each.numbers) for each in some))})
        return pa.Table.from_batches([each.batch.select(self.columns) for each in some])

    def _run(self, table: pa.Table, expression: str) -> pa.Array:
        """Return for each row whether the expression is true; null counts as false."""
        self._db.register("rows", table)
        found = self._db.sql(f"SELECT ({expression}\n) AS keep FROM rows").to_arrow_table()
        return found["keep"].combine_chunks().fill_null(False)

    def _tell(
        self, some: list[rows.Rows], table: pa.Table, place: Callable[[int], str], on_fault: rows.OnFault
    ) -> None:
        failed = self._run(table, f"TRY(({self._text}\n) IS NULL) IS NULL")
        numbers = pa.concat_arrays([each.numbers for each in some])
        for told, at in enumerate(pc.indices_nonzero(failed).to_pylist()):
            row = numbers[at].as_py()
            reason = self._reason(table.slice(at, 1)) if told < _MOST_REASONS else _NO_REASON
            on_fault(rows.Fault(row, place(row), f"--where: {reason}"))

    def _reason(self, row: pa.Table) -> str:
        try:
            self._run(row, self._text)
        except duckdb.Error as error:
            return _first_line(error)
        return _NO_REASON

    def _unquoted(self, reason: str = "") -> str:
        """Return a hint at columns that are no words, or words of SQL at which it stopped."""
        bare = _QUOTED.sub("", self._text)
        for name in self._schema.names:
            if name in bare and (_quoted(name) != name or f'"{name}"' in reason):
                return f'. Put the column\'s name in double quotes: "{name}"'
        return ""

    def _cast(self, reason: str) -> str:
        """Return a hint at a column of text that is compared with a number."""
        if "explicit" not in reason or "cast" not in reason:
            return ""
        for name in self.columns:
            if pa.types.is_string(self._schema.field(name).type):
                return f". {name} is text: write cast({_quoted(name)} as int), or as double"
        return ""

    def _refused(self, reason: str) -> input_errors.WhereRefused:
        return input_errors.WhereRefused(where=self._text, reason=reason)


def _quoted(name: str) -> str:
    """Return a column's name as an expression has it."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) else f'"{name}"'


def _with_some_column(table: pa.Table) -> pa.Table:
    return table if table.num_columns else pa.table({"": pa.nulls(table.num_rows)})


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        if "class" in tree:
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _nodes(item)


def _columns(nodes: list[dict[str, Any]], known: list[str]) -> list[str]:
    """Return the columns that an expression may mean, which to DuckDB are the same in capitals."""
    parts = {part for node in nodes if node["class"] == "COLUMN_REF" for part in node["column_names"]}
    exact = [name for name in known if name in parts]
    taken = {name.lower() for name in exact}
    wanted = {part.lower() for part in parts} - taken
    return exact + [name for name in known if name.lower() in wanted]


def _gathered(batches: Iterator[rows.Rows]) -> Iterator[list[rows.Rows]]:
    """Yield several batches at a time: a query has a price of its own."""
    some: list[rows.Rows] = []
    count = held = 0
    for each in batches:
        some.append(each)
        count, held = count + each.batch.num_rows, held + each.batch.nbytes
        if count >= _GATHER_ROWS or held >= _GATHER_BYTES:
            yield some
            some, count, held = [], 0, 0
    if some:
        yield some


def _filtered(some: list[rows.Rows], keep: pa.Array) -> Iterator[rows.Rows]:
    at = 0
    for each in some:
        mask = keep.slice(at, len(each.numbers))
        at += len(each.numbers)
        # A batch without columns says that it has no rows.
        batch = each.batch.filter(mask) if each.batch.num_columns else each.batch
        left = rows.Rows(each.numbers.filter(mask), batch)
        if len(left.numbers):
            yield left


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
