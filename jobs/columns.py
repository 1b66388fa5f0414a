"""Fits a table into a width: what matters least gives way first, words are cut next, numbers never are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import cells, measure, table, text
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style

NARROW = 72
"""Below this width an id has no room beside a state and counts."""
_INDENT = "  "
_ROOMY = 80
"""From this width on two columns have two spaces between them, else one."""
_LEAST_WORDS = 6
"""Letters of a word that say something."""


@dataclass(frozen=True)
class Bar:
    """How much is done of all, in `width` cells or as many as there is room for; it reads without colour."""

    done: int
    total: int
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width, options.max_width)
        full = min(width, width * self.done // self.total) if self.total else 0
        one, other = ("#", ".") if options.ascii_only else ("━", "·")
        yield Segment(one * full, Style(color="green" if full == width else "cyan"))
        yield Segment(other * (width - full), Style(dim=True))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> measure.Measurement:
        return measure.Measurement(1, self.width)


@dataclass(frozen=True)
class Column:
    """One column. `rank`: of those that are too many the highest goes first, 0 stays.

    `number`: on the right. Numbers, and what is `whole`, are shown whole or not at all.
    """

    title: str
    shown: Sequence[str | text.Text | Bar]
    rank: int = 0
    number: bool = False
    whole: bool = False

    @property
    def width(self) -> int:
        """How wide it would be."""
        return max(cells.cell_len(self.title), *map(_width, self.shown), 1)

    @property
    def narrowest(self) -> int:
        """How wide it must be."""
        return self.width if self.number or self.whole else min(self.width, _LEAST_WORDS)


class Headed:
    """A table each of whose rows has a line of its own above it: what has no room beside the others."""

    def __init__(self, heads: Sequence[str], made: table.Table) -> None:
        self._heads, self._made = heads, made
        self.row_count = 2 * len(heads)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(1, options.max_width - len(_INDENT)))
        title, *rows = console.render_lines(self._made, inner, pad=False)
        yield from _indented(title)
        for head, row in zip(self._heads, rows, strict=True):
            yield text.Text(head, no_wrap=True, overflow="ellipsis")
            yield from _indented(row)


def headed(heads: Sequence[str], columns: Sequence[Column], width: int) -> Headed:
    """Return a table of the columns, each row of it below its head; only a head that is too long is cut."""
    return Headed(heads, fitted(columns, max(1, width - len(_INDENT))))


def fitted(columns: Sequence[Column], width: int | None) -> table.Table:
    """Return a table of the columns that are no wider together than `width` (None: all of each)."""
    widths = [one.width for one in columns]
    if width is not None:
        columns = _kept(columns, width)
        widths = _narrowed(columns, width)
    gap = (0, 2 if width is None else _gap(width), 0, 0)
    made = table.Table(box=None, pad_edge=False, padding=gap, header_style="bold", expand=False)
    for one, wide in zip(columns, widths, strict=True):
        justify: Literal["left", "right"] = "right" if one.number else "left"
        made.add_column(one.title, justify=justify, no_wrap=True, overflow="ellipsis", width=wide)
    for row in zip(*(one.shown for one in columns), strict=True):
        made.add_row(*(text.Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def lines(made: table.Table | Headed, printer: Console) -> list[str]:
    """Return a table as lines, each without the spaces at its end."""
    with printer.capture() as caught:
        printer.print(made)
    return [line.rstrip() for line in caught.get().splitlines()]


def narrowest(columns: Sequence[Column], width: int) -> int:
    """Return how much of a width the columns need at least."""
    return _together([one.narrowest for one in columns], width)


def facts(parts: Sequence[str], width: int, between: str) -> str:
    """Return the parts in one line, without the last ones where they do not fit; the first always stays."""
    kept = list(parts)
    while len(kept) > 1 and cells.cell_len(between.join(kept)) > width:
        kept.pop()
    return between.join(kept)


def _indented(line: Sequence[Segment]) -> RenderResult:
    yield Segment(_INDENT)
    yield from line
    yield Segment.line()


def _kept(columns: Sequence[Column], width: int) -> list[Column]:
    kept = list(columns)
    while narrowest(kept, width) > width:
        least = max(kept, key=lambda one: one.rank)
        if not least.rank:
            break
        kept.remove(least)
    return kept


def _narrowed(columns: Sequence[Column], width: int) -> list[int]:
    """Take what is too much from the columns that may be cut: from the least important first."""
    widths = [one.width for one in columns]
    order = sorted(range(len(columns)), key=lambda place: -columns[place].rank)
    least = {place: columns[place].narrowest for place in order}
    last_resort = {place: 1 for place in order if not columns[place].number}
    for narrowest_each in (least, last_resort):
        for place, narrow in narrowest_each.items():
            over = max(0, _together(widths, width) - width)
            widths[place] = min(widths[place], max(narrow, widths[place] - over))
    return widths


def _together(widths: Sequence[int], width: int) -> int:
    return sum(widths) + _gap(width) * max(0, len(widths) - 1)


def _gap(width: int) -> int:
    return 2 if width >= _ROOMY else 1


def _width(cell: Any) -> int:
    return cell.width if isinstance(cell, Bar) else cells.cell_len(str(cell))
