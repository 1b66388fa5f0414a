"""The next token of many rows at once: greedy ones by one argmax, sampled ones by one draw.

In this order: repetition, presence and frequency penalties, logit bias, what may not end yet, the grammar;
then, for rows that are sampled, temperature, top_k, top_p and min_p. Log probabilities are of the logits
before all that.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from worker.engine import device_errors, logprobs, penalties, sampling
from worker.engine.grammar import GrammarFailed
from worker.engine.rows import NOT_FINITE, RowState, one_line
from worker.engine.types import TokenLogprobs

log = logging.getLogger(__name__)
Result = TypeVar("Result")


@torch.inference_mode()  # logits come from it, and may be changed in place only in it
def choose(states: Sequence[RowState], logits: Tensor) -> list[int]:
    """Return the next token of each row from its logits [R, V], which change. A row for which that cannot be
    done has its `failure` set, and a token that does not count.
    """
    asking = [row for row, state in enumerate(states) if state.row.request.sampling.logprobs is not None]
    changed = [row for row, state in enumerate(states) if state.changes_logits]
    if changed:  # half precision would round a small bias away, and float16 ends below a large factor
        logits = sampling.with_kernels(logits)
    own = {row: logits[row].clone() for row in asking if states[row].changes_logits}
    if changed:
        _change(states, logits, changed)
    highest = _highest(logits)
    _check(states, logits.gather(1, highest[:, None])[:, 0].tolist())
    chosen: list[int] = highest.tolist()
    for row, token_id in _drawn(states, logits).items():
        chosen[row] = token_id
    if asking:
        kept = logits if not own and len(asking) == len(states) else None
        rows = kept if kept is not None else torch.stack([own.get(row, logits[row]) for row in asking])
        _note_logprobs([states[row] for row in asking], rows, [chosen[row] for row in asking])
    return chosen


def _check(states: Sequence[RowState], highest: list[float]) -> None:
    """Fail the rows whose highest logit is not a number that can be chosen."""
    for state, value in zip(states, highest, strict=True):
        if not math.isfinite(value) and state.failure is None:
            allowed = "no token is allowed by the request's own parameters"
            state.failure = allowed if value == -math.inf and state.changes_logits else NOT_FINITE


def _change(states: Sequence[RowState], logits: Tensor, rows: list[int]) -> None:
    """Turn the model's logits into those that tokens are chosen from, in place."""
    penalties.adjust(logits, [(row, a) for row in rows if (a := states[row].adjustments) is not None])
    for row in rows:
        state = states[row]
        if state.end_ids and not state.may_end:
            # A tokenizer may have more tokens than the model.
            logits[row, [id for id in state.end_ids if id < logits.shape[1]]] = -torch.inf
        if state.constraint is not None and state.failure is None:
            try:
                state.constraint.restrict(logits[row])
            except Exception as error:  # a grammar may fail in ways of its own: its row alone ends
                if device_errors.is_lost(error):
                    raise
                state.failure = str(error) if isinstance(error, GrammarFailed) else one_line(error)


def _drawn(states: Sequence[RowState], logits: Tensor) -> dict[int, int]:
    """Return the tokens of the rows that are sampled."""

    def draw(rows: list[int]) -> dict[int, int]:
        wanted = [states[row].row.request.sampling for row in rows]
        positions = [len(states[row].row.token_ids) for row in rows]
        those = logits if len(rows) == len(states) else logits[rows]
        drawn = sampling.draw(those, sampling.Parameters.of(wanted, logits.device), positions).tolist()
        return dict(zip(rows, drawn, strict=True))

    sampled = [
        row
        for row, state in enumerate(states)
        if state.failure is None and not state.row.request.sampling.greedy
    ]
    return _each_alone(states, sampled, draw)


def _each_alone(
    states: Sequence[RowState], rows: list[int], call: Callable[[list[int]], dict[int, Result]]
) -> dict[int, Result]:
    """Return what `call` gives for the rows together; if it raises, row by row: who raises alone fails."""
    if not rows:
        return {}
    try:
        return call(rows)
    except Exception as error:  # whatever it is, one of the rows is at fault, or each is
        if device_errors.is_lost(error) or device_errors.is_out_of_memory(error):
            raise
        if len(rows) == 1:
            states[rows[0]].failure = one_line(error)
            return {}
        log.warning("rows are tried one by one", extra={"rows": len(rows)}, exc_info=True)
    found: dict[int, Result] = {}
    for row in rows:
        found |= _each_alone(states, [row], call)
    return found


def _note_logprobs(states: Sequence[RowState], logits: Tensor, chosen: list[int]) -> None:
    """Give rows the log probabilities of their tokens, by the model's own logits [R, V]."""

    def of(rows: list[int]) -> dict[int, TokenLogprobs]:
        wanted = [states[row].row.request.sampling.logprobs or 0 for row in rows]
        those = logits if len(rows) == len(states) else logits[rows]
        return dict(zip(rows, logprobs.of_tokens(those, [chosen[row] for row in rows], wanted), strict=True))

    good = [row for row, state in enumerate(states) if state.failure is None]
    for row, found in _each_alone(states, good, of).items():
        states[row].note_logprobs(found)


def _highest(logits: Tensor) -> Tensor:
    """Return the index of the highest logit of each row [R], of a NaN if there is one."""
    if logits.device.type == "cpu" and logits.dtype != torch.bfloat16:
        return torch.from_numpy(logits.numpy().argmax(-1))  # several times as fast as torch's
    return logits.argmax(-1)
