"""The next token of many sequences at once: greedy rows by one argmax, sampled rows by one draw."""

import torch
from torch import Tensor

from worker.engine import sampling
from worker.engine.sequence import Sequence

# Below this, dividing by the temperature overflows; the result would be greedy anyhow.
_GREEDY_TEMPERATURE = 1e-5


@torch.inference_mode()  # logits come from it, and may be changed in place only in it
def choose(sequences: list[Sequence], logits: Tensor) -> list[int]:
    """Return the next token of each sequence from its logits [R, V]; mark those whose logits are not
    finite.
    """
    for row, sequence in enumerate(sequences):
        state = sequence.state
        if state.end_ids and not state.may_end:
            logits[row, sorted(state.end_ids)] = -torch.inf
    ids = _highest(logits)
    finite = torch.isfinite(logits.gather(1, ids[:, None])[:, 0]).tolist()
    chosen: list[int] = ids.tolist()
    sampled = []
    for row, sequence in enumerate(sequences):
        sequence.state.broken = not finite[row]
        if finite[row] and sequence.row.request.sampling.temperature >= _GREEDY_TEMPERATURE:
            sampled.append(row)
    if sampled:
        wanted = [sequences[row].row.request.sampling for row in sampled]
        positions = [len(sequences[row].row.token_ids) for row in sampled]
        parameters = sampling.Parameters.of(wanted, logits.device)
        rows = logits if len(sampled) == len(sequences) else logits[sampled]
        for row, token_id in zip(sampled, sampling.draw(rows, parameters, positions).tolist(), strict=True):
            chosen[row] = token_id
    return chosen


def _highest(logits: Tensor) -> Tensor:
    """Return the index of the highest logit of each row [R], of a NaN if there is one."""
    if logits.device.type == "cpu" and logits.dtype != torch.bfloat16:
        return torch.from_numpy(logits.numpy().argmax(-1))  # several times as fast as torch's
    return logits.argmax(-1)
