"""Which waiting requests run together in one padded batch."""

from dataclasses import dataclass

from worker.engine.types import Row


@dataclass(frozen=True)
class Limits:
    """Bounds of one batch: rows, tokens with padding and outputs, row positions; or one prompt length."""

    rows: int
    tokens: int
    context_tokens: int
    one_length: bool = False


def form(waiting: list[Row], limits: Limits) -> list[Row]:
    """Return the oldest waiting row and those most like it, longest prompt first, within the limits.

    A lone row always fits. Rows are alike when little would be padded: in front of the prompts and,
    because the batch runs until its last row ends, behind the outputs.
    """
    if not waiting:
        return []
    oldest = waiting[0]
    alike = sorted(waiting, key=lambda row: _padding(row, oldest))
    if limits.one_length:
        alike = [row for row in alike if row.prompt_tokens == oldest.prompt_tokens]
    batch: list[Row] = []
    prompt = output = 0
    for row in alike[: limits.rows]:
        prompt, output = max(prompt, row.prompt_tokens), max(output, row.max_tokens)
        # A row that has ended keeps its place in the batch, so the longest of both must fit the positions.
        fits = (
            prompt + output <= limits.context_tokens and (len(batch) + 1) * (prompt + output) <= limits.tokens
        )
        if batch and not fits:
            break
        batch.append(row)
    return sorted(batch, key=lambda row: -row.prompt_tokens)


def cost(rows: list[Row]) -> int:
    """Return how many tokens a batch of these rows may hold in the end, padding included."""
    return len(rows) * (max(row.prompt_tokens for row in rows) + max(row.max_tokens for row in rows))


def _padding(a: Row, b: Row) -> int:
    return abs(a.prompt_tokens - b.prompt_tokens) + abs(a.max_tokens - b.max_tokens)
