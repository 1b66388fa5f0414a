"""The next tokens of a step while they stay on the device: the host decides nothing by a value of it.

For rows whose token needs nothing of the host: no penalties, bias, grammar, log probabilities or tokens that
may not come yet. Everything else is as in choosing and sampling, and comes out the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import sampling, seeds
from worker.engine.types import Sampling

Stage = Callable[[NDArray[Any]], Tensor]


@dataclass(frozen=True, eq=False)
class Plan:
    """How the tokens of R rows are chosen: made on the host, with its values on the device.

    `rows` [S] int64 are those that are sampled; None: all are, or none, which then have no `parameters`.
    `truncates`: some have top_k or top_p.
    """

    rows: Tensor | None
    parameters: sampling.Parameters | None
    uniforms: Tensor | None
    truncates: bool = False

    @classmethod
    def of(cls, samplings: Sequence[Sampling], positions: Sequence[int], stage: Stage) -> "Plan":
        """Plan the tokens of rows at their positions in the output."""
        sampled = [row for row, one in enumerate(samplings) if not one.greedy]
        if not sampled:
            return cls(None, None, None)
        those = [samplings[row] for row in sampled]
        uniforms = [seeds.uniform(one.seed, positions[row]) for row, one in zip(sampled, those, strict=True)]
        values = [(one.temperature, one.top_p, one.top_k, one.min_p) for one in those]
        columns = stage(np.array([*zip(*values, strict=True), uniforms], dtype=np.float64))
        temperature, top_p, top_k, min_p, staged = columns.unbind()
        parameters = sampling.Parameters(
            [one.seed for one in those],
            temperature[:, None],
            top_p[:, None],
            top_k.long()[:, None],
            min_p[:, None],
        )
        every = len(sampled) == len(samplings)
        truncates = any(one.top_k > 0 or one.top_p < 1 for one in those)
        rows = None if every else stage(np.array(sampled, dtype=np.int64))
        return cls(rows, parameters, staged, truncates)


def chosen(logits: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return a token of each row from its logits [R, V] as ids [R] int64, and which of them are doubtful [R].

    A row is doubtful if its highest logit is not a finite number, or if more tokens than were looked at may
    be in its nucleus. Its id is then that of the highest logit, or of a NaN, which is one of the vocabulary
    but does not count: choosing.choose decides it. Waits for nothing.
    """
    highest = logits.argmax(-1, keepdim=True)
    doubtful = ~logits.gather(1, highest).isfinite()
    ids = highest[:, 0]
    if plan.parameters is None:
        return ids, doubtful[:, 0]
    those = logits if plan.rows is None else logits.index_select(0, plan.rows)
    drawn, undecided = _drawn(those, plan)
    if plan.rows is not None:
        drawn = ids.index_copy(0, plan.rows, drawn)
        undecided = torch.zeros_like(doubtful).index_copy(0, plan.rows, undecided)
    doubtful = (doubtful | undecided)[:, 0]
    return torch.where(doubtful, ids, drawn), doubtful


def _drawn(logits: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return the tokens drawn [S], and for which they are not decided [S, 1]."""
    assert plan.parameters is not None
    assert plan.uniforms is not None
    weights = sampling.weights_of(logits, plan.parameters)
    undecided = torch.zeros_like(plan.parameters.top_k, dtype=torch.bool)
    if plan.truncates:
        threshold, open_ones = sampling.first_threshold(weights, plan.parameters)
        weights = torch.where(weights >= threshold, weights, 0.0)
        undecided = undecided if open_ones is None else open_ones
    weights = torch.where(weights >= plan.parameters.min_p, weights, 0.0)
    return sampling.drawn(weights, plan.uniforms), undecided
