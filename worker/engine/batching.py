"""Which requests run together in one padded batch, and when a batch has grown too large."""

from dataclasses import dataclass

from jobs import buckets
from worker.engine.types import Row

# A request that names no max_tokens may take the rest of the context, but seldom does: room for so many
# tokens is planned. A batch that outgrows its limits is cut, and its unfinished rows go on in smaller ones.
_PLANNED_OUTPUT_TOKENS = 1024


@dataclass(frozen=True)
class Limits:
    """Bounds of one batch: rows; tokens, padding and outputs included; positions. Or rows of one length."""

    rows: int
    tokens: int
    context_tokens: int
    one_length: bool = False

    def allow(self, rows: list[Row]) -> bool:
        """Tell whether so many rows may be planned to run together. A lone row always may."""
        return len(rows) == 1 or len(rows) * min(length(rows), self.context_tokens) <= self.tokens

    def reached(self, rows: int, length: int) -> bool:
        """Tell whether a batch whose rows are `length` tokens long must not grow by another token."""
        return rows > 1 and (length >= self.context_tokens or rows * (length + 1) > self.tokens)


def form(waiting: list[Row], limits: Limits) -> list[Row]:
    """Return the oldest waiting row and those most like it, longest first, within the limits.

    Only rows of its length bucket: padding short prompts to long ones costs more than a batch of their own.
    Rows are alike when little would be padded: in front of the prompts and, because the batch runs until its
    last row ends, behind the outputs.
    """
    if not waiting:
        return []
    oldest = waiting[0]
    kind = _tokens if limits.one_length else _bucket
    alike = [row for row in waiting if kind(row) == kind(oldest)]
    alike.sort(key=lambda row: _padding(row, oldest))
    batch: list[Row] = []
    for row in alike[: limits.rows]:
        if not limits.allow([*batch, row]):
            break
        batch.append(row)
    return sorted(batch, key=lambda row: -row.tokens)


def length(rows: list[Row]) -> int:
    """Return how many tokens long a batch of these rows is planned to grow, padding included."""
    planned = max(min(row.tokens_left, _PLANNED_OUTPUT_TOKENS) for row in rows)
    return max(row.tokens for row in rows) + planned


def _tokens(row: Row) -> int:
    return row.tokens


def _bucket(row: Row) -> int:
    return buckets.bucket(row.tokens)


def _padding(a: Row, b: Row) -> int:
    return abs(a.tokens - b.tokens) + abs(a.tokens_left - b.tokens_left)
