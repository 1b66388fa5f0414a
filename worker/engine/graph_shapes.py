"""How large recorded steps are: few sizes, little padding, whatever the steps are like."""

from dataclasses import dataclass

from worker.engine.paged_step import Own, PagedStep, Rows

_LEAST_STEP = 8


def rows_for(rows: int) -> int:
    """Return the batch size that `rows` are padded to: 1, 2, 4, 8, 16, 24, ... 64, 80, ... 128, 160, ... From
    32 rows on, fewer than a quarter as many are padding; below, fewer than 8.
    """
    if rows <= _LEAST_STEP:
        return power_for(rows)
    step = max(_LEAST_STEP, power_for(rows) // 8)
    return -(-rows // step) * step


def power_for(size: int) -> int:
    """Return the least power of two that is not below `size`; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


@dataclass(frozen=True)
class Shape:
    """The sizes of a recorded step: `rows` tokens, one a row, on tables of `own` pages, and of `whole` pages
    where layers with a window read others (0: the same). `shared_rows` rows of `shared` pages are seen by as
    many as all tokens, each of which sees up to `levels` of them.
    """

    rows: int
    own: int
    whole: int = 0
    shared_rows: int = 0
    shared: int = 0
    levels: int = 0

    @classmethod
    def of(cls, step: PagedStep) -> "Shape | None":
        """Return the shape that a step is padded to; None if it is not one token of each row."""
        own, whole = _decode_only(step.own), _decode_only(step.whole)
        if own is None or whole is None or step.streamed or len(step.wanted) > len(step.ids):
            return None
        other = 0 if step.whole is step.own else _width(whole)
        if step.shared is None:
            return cls(rows_for(len(step.ids)), _width(own), other)
        rows, places = step.shared.rows, step.shared.places
        shared = power_for(len(rows.lengths)), _width(rows), power_for(places.shape[1])
        return cls(rows_for(len(step.ids)), _width(own), other, *shared)


def _decode_only(own: Own) -> Rows | None:
    return own.decode if own.prefill is None else None


def _width(rows: Rows) -> int:
    return power_for(rows.tables.shape[1])
