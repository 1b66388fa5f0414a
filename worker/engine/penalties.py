"""What a request adds to and takes from its logits: bias, presence, frequency and repetition penalties."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.types import Sampling

Ids = NDArray[np.int64]
Values = NDArray[np.float64]


class Adjustments:
    """How the logits of one row change with the tokens it has taken."""

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        self._presence, self._frequency = sampling.presence_penalty, sampling.frequency_penalty
        self._repetition = sampling.repetition_penalty
        self._biased = np.array([id for id, _ in sampling.logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        self._sampled = _Counts()
        self._seen = _Counts()
        if self._repetition != 1:
            for token_id in dict.fromkeys(prompt_ids):
                self._seen.add(token_id)
        for token_id in token_ids:
            self.take(token_id)

    @classmethod
    def of(cls, sampling: Sampling, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Self | None:
        """Return those of a row, None if it has none. `token_ids` are what it has sampled already."""
        penalised = (
            sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1
        )
        return cls(sampling, prompt_ids, token_ids) if penalised or sampling.logit_bias else None

    def take(self, token_id: int) -> None:
        """Count a sampled token."""
        if self._presence or self._frequency:
            self._sampled.add(token_id)
        if self._repetition != 1:
            self._seen.add(token_id)

    def factors(self) -> tuple[Ids, Values]:
        """Return token ids, each once, and by what their logits are divided, or multiplied if negative."""
        ids = self._seen.ids
        return ids, np.full(len(ids), self._repetition)

    def penalties(self) -> tuple[Ids, Values]:
        """Return token ids, each once, and what is then added to their logits."""
        return self._sampled.ids, -(self._presence + self._frequency * self._sampled.counts)

    def biases(self) -> tuple[Ids, Values]:
        """Return token ids, each once, and what is added to their logits at last."""
        return self._biased, self._biases


class _Counts:
    """How often each token has come, in arrays that grow."""

    def __init__(self) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.empty(32, dtype=np.int64)
        self._counts = np.empty(32, dtype=np.float64)

    def add(self, token_id: int) -> None:
        place = self._place.get(token_id)
        if place is None:
            place = self._place[token_id] = len(self._place)
            if place == len(self._ids):
                self._ids, self._counts = np.resize(self._ids, 2 * place), np.resize(self._counts, 2 * place)
            self._ids[place], self._counts[place] = token_id, 0
        self._counts[place] += 1

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> Values:
        return self._counts[: len(self._place)]


def adjust(logits: Tensor, rows: Sequence[tuple[int, Adjustments]]) -> None:
    """Change the logits [R, V] of the given rows in place, all rows at once."""
    if found := _gathered(logits, [(row, *each.factors()) for row, each in rows]):
        at, factors = found
        logits[at] = torch.where(logits[at] > 0, logits[at] / factors, logits[at] * factors)
    for parts in (
        [(row, *each.penalties()) for row, each in rows],
        [(row, *each.biases()) for row, each in rows],
    ):
        if found := _gathered(logits, parts):
            at, values = found
            logits[at] += values


def _gathered(
    logits: Tensor, parts: list[tuple[int, Ids, Values]]
) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """Return an index of rows and columns, none of them twice, and their values; None: there are none."""
    parts = [part for part in parts if len(part[1])]
    if not parts:
        return None
    rows = np.repeat([row for row, _, _ in parts], [len(ids) for _, ids, _ in parts])
    columns = np.concatenate([ids for _, ids, _ in parts])
    values = torch.from_numpy(np.concatenate([values for _, _, values in parts]))
    at = torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)
    return at, values.to(logits.device, logits.dtype)
