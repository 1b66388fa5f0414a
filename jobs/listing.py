"""How `longhaul list` looks: a table of jobs, and below one whose input was refused why."""

import time
from collections.abc import Sequence
from typing import Any

from rich import cells, console

from jobs import columns, schema, values
from jobs.client import Batch
from jobs.columns import Column

UNLIMITED = 100_000
"""The width of what is no terminal (columns)."""


def lines(batches: Sequence[Batch], width: int | None, printer: console.Console) -> list[str]:
    """Return the lines that list jobs; where the width is None all of each."""
    names = [one.id for one in batches]
    facts = [
        Column("STATE", [one.status for one in batches], rank=1, whole=True),
        Column("DONE", [_done(one) for one in batches], number=True),
        Column("FAILED", [_failed(one) for one in batches], rank=3, number=True),
        Column("CREATED", [_when(one.created_at) for one in batches], rank=4, number=True),
        Column("MODEL", [values.printable(one.model or "-") for one in batches], rank=5),
    ]
    table: Any
    if narrow := width is not None and width < columns.NARROW:
        table = columns.headed(names, facts, width)
    else:
        table = columns.fitted([Column("JOB", names, whole=True), *facts], width)
    head, *rows = columns.lines(table, printer)
    made, each = [head], 2 if narrow else 1
    for place, batch in enumerate(batches):
        made += [*rows[place * each : (place + 1) * each], *_why(batch, width or UNLIMITED)]
    return made


def fault(error: schema.LineError) -> str:
    """Return what is wrong with a line of an input, in one line: it may quote what stands there."""
    where = f"line {error.line}: " if error.line else ""
    return values.printable(f"{where}{error.message} ({error.code})".replace("\n", " "))


def _why(batch: Batch, width: int) -> list[str]:
    faults = batch.errors.data if batch.errors else []
    if not faults:
        return []
    more = f"; and {len(faults) - 1:,} more" if len(faults) > 1 else ""
    words = fault(faults[0])
    room = width - len(more) - 2
    if cells.cell_len(words) > room:
        words = cells.set_cell_size(words, max(1, room - 1)).rstrip() + "…"
    return [f"  {words}{more}"]


def _done(batch: Batch) -> str:
    total = batch.request_counts.total
    return f"{batch.done:,}/{total:,}" if total else "-"


def _failed(batch: Batch) -> str:
    # Of a job whose input was refused no request was counted: 0 would read as if none were wrong.
    return f"{batch.request_counts.failed:,}" if batch.request_counts.total else "-"


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
