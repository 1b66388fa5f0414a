"""What can be said before any work: the first prompt, lengths, what is shared, and what would share more."""

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jobs import tokens
from jobs.dataset import prompt, recipe
from jobs.dataset.input import rows as in_rows
from jobs.dataset.input import source

SAMPLE_ROWS = 1000
_MOST_CHARACTERS = 2000
_UNIQUE = 0.9
"""A column with more distinct values than this share of the rows is taken to be different in each."""

_WORTH = 0.05
"""Another order is named if it shares so much more."""


@dataclass(frozen=True)
class Survey:
    """What the first rows tell. `lengths` of prompts in `unit` (tokens or characters): least, median, most.

    `shared` is the part of all prompts that an earlier one begins with, 0 to 1; `advice` the order of the
    template's parts that would share more, and how much, None where there is no better one.
    """

    sampled: int
    unfit: int
    first: list[dict[str, str]] | None
    lengths: tuple[int, int, int] | None
    unit: str
    shared: float
    repeated: tuple[str, ...]
    advice: "Advice | None"
    warnings: tuple[str, ...] = ()

    def lines(self, rows: int, samples: int) -> list[str]:
        """Return it in words, with the number of rows and of the samples of each."""
        if not rows:
            return ["No row is left to do: --where is true for none."]
        said = ["The first prompt:"] if self.first else []
        for message in self.first or ():
            content = message["content"]
            more = f" ... ({len(content):,} characters)" if len(content) > _MOST_CHARACTERS else ""
            said.append(f"  {message['role']}: {content[:_MOST_CHARACTERS]}{more}")
        said.append(f"Rows: {rows:,}" + (f", {samples} samples each" if samples > 1 else ""))
        if self.lengths:
            least, median, most = self.lengths
            spread = f"least {least:,}, median {median:,}, most {most:,}"
            why = "" if self.unit == "tokens" else " (the tokenizer is not here)"
            said.append(f"Prompt {self.unit} of the first {self.sampled:,}: {spread}{why}")
            said.append(f"Expected prefix hits: {self.shared:.0%} of the {self.unit}")
        if self.unfit:
            said.append(f"{self.unfit:,} of the first {self.sampled + self.unfit:,} rows have no prompt")
        if self.advice:
            said.append(
                f"With the template's parts in another order {self.advice.shared:.0%} of its characters would"
                f" be shared, not {self.advice.now:.0%}: {', '.join(self.advice.order)}"
            )
        return said + [f"Note: {warning}" for warning in self.warnings]


@dataclass(frozen=True)
class Advice:
    """An order of a template's parts; what of the characters is shared now, and would be then, 0 to 1."""

    order: tuple[str, ...]
    now: float
    shared: float


def survey(
    rows: source.Source,
    made: prompt.Prompt,
    made_by: recipe.Recipe,
    tokenizer: tokens.Tokenizer | None,
    samples: int,
) -> Survey:
    """Look at the first rows."""
    needed = made.columns(rows.schema.names)
    records = _first(rows, needed)
    rendered, fit = [], []
    for record in records:
        try:
            rendered.append(made.render(record))
            fit.append(record)
        except prompt.RowUnfit:
            continue
    encoded, unit = _encoded(rendered, made_by, tokenizer)
    lengths = sorted(map(len, encoded))
    shared = share(encoded)
    return Survey(
        sampled=len(rendered),
        unfit=len(records) - len(rendered),
        first=rendered[0] if rendered else None,
        lengths=(lengths[0], int(statistics.median(lengths)), lengths[-1]) if lengths else None,
        unit=unit,
        shared=1 - (1 - shared) / samples,
        repeated=_repeated(made, fit),
        advice=_advice(made, fit),
        warnings=tuple(_warnings(made, made_by, needed, rows.schema.names)),
    )


def _warnings(
    made: prompt.Prompt, made_by: recipe.Recipe, needed: Sequence[str], offered: Sequence[str]
) -> Iterator[str]:
    """Yield what was perhaps not meant."""
    if not needed:
        single = [name for name in offered if any(f"{{{name}}}" in one.content for one in made.messages)]
        example = (single or list(offered))[0]
        yield f"the prompt names no column, so all rows have the same: write {{{{ {example} }}}}, two braces."
    if made_by.parameters.max_tokens is None and made_by.output_schema is None:
        yield "no --max-tokens: an output may become as long as the model's context."


def share(prompts: Sequence[Any]) -> float:
    """Return the part of all prompts that begins another one before it, when they are sorted."""
    total = sum(map(len, prompts))
    ordered = sorted(prompts)
    common = sum(_common(one, other) for one, other in itertools.pairwise(ordered))
    return common / total if total else 0.0


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how long the beginning is that two prompts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _first(rows: source.Source, columns: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for batch in rows.rows():
        found += in_rows.records(batch.batch.select(columns).slice(0, SAMPLE_ROWS - len(found)))
        if len(found) >= SAMPLE_ROWS:
            break
    return found


def _encoded(
    rendered: list[list[dict[str, str]]], made_by: recipe.Recipe, tokenizer: tokens.Tokenizer | None
) -> tuple[list[Any], str]:
    """Return prompts as token ids where there is a tokenizer, else as text."""
    if tokenizer is None:
        return ["\n".join(message["content"] for message in messages) for messages in rendered], "characters"
    if made_by.endpoint == recipe.COMPLETION:
        return tokenizer.encode_prompts([messages[0]["content"] for messages in rendered]), "tokens"
    chats = [prompt_text(tokenizer, messages) for messages in rendered]
    return tokenizer.encode_chats([text for text in chats if text]), "tokens"


def prompt_text(tokenizer: tokens.Tokenizer, messages: list[dict[str, str]]) -> str:
    """Return a chat as the model's template renders it."""
    return tokenizer.template.render(messages)


def _distinct(column: str, records: list[dict[str, Any]]) -> float:
    return len({repr(record.get(column)) for record in records}) / max(1, len(records))


def _repeated(made: prompt.Prompt, records: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the columns to sort rows by: in the template's order, up to the first that never repeats.

    Behind a part that differs in each row nothing is shared, whatever the order of rows.
    """
    found: list[str] = []
    for part in made.parts():
        for column in part.columns:
            if column == prompt.ROW or _distinct(column, records) > _UNIQUE:
                return tuple(found)
            if column not in found:
                found.append(column)
    return tuple(found)


def _advice(made: prompt.Prompt, records: list[dict[str, Any]]) -> Advice | None:
    """Find an order of the template's parts with more in common: constants, then what repeats most.

    Fields by the characters that repeating them saves, as prompts of relational data are ordered in
    "Optimizing LLM Queries in Relational Data Analytics Workloads" (Liu et al., 2024).
    """
    parts = made.parts()
    fields = [part for part in parts if part.columns]
    if len(records) < 2 or any(prompt.ROW in part.columns for part in fields):
        return None
    constants = [part for part in parts if not part.columns and part.text.strip()]
    ordered = [*constants, *sorted(fields, key=lambda part: _saved(part, records), reverse=True)]
    now, then = share(_texts(parts, records)), share(_texts(ordered, records))
    if then < now + _WORTH:
        return None
    order = tuple(" + ".join(part.columns) if part.columns else _short(part.text) for part in ordered)
    return Advice(order, now, then)


def _saved(part: prompt.Part, records: list[dict[str, Any]]) -> float:
    values = [_value(part, record) for record in records]
    return statistics.fmean(map(len, values)) * (1 - len(set(values)) / len(values))


def _texts(order: Sequence[prompt.Part], records: list[dict[str, Any]]) -> list[str]:
    return ["".join(_value(part, record) for part in order) for record in records]


def _value(part: prompt.Part, record: dict[str, Any]) -> str:
    return "\x1f".join(str(record[column]) for column in part.columns) if part.columns else part.text


def _short(text: str) -> str:
    words = " ".join(text.split())
    return repr(words if len(words) <= 40 else words[:37] + "...")
