"""A model whose logits are a hash of the tokens a query sees: what the engine plans is exact or all is
different.
"""

import torch
from torch import Tensor

from worker.engine import attention, kv, runner
from worker.engine.step import Step

VOCABULARY = 97


def next_token(tokens: list[int]) -> int:
    """What the model says after these tokens."""
    return hash_of(list(enumerate(tokens)))


class HashRunner(runner.StorageRunner):
    """Keeps (position, token) as keys in the real KV memory, and hashes what the parts of a step let a query
    see.
    """

    def __init__(self) -> None:
        self.reads_beyond = True
        self.layout = kv.Layout(((1, 2, 2),), torch.float64, torch.device("cpu"))
        self.largest_step = 0

    def step(self, step: Step) -> Tensor:
        self.largest_step = max(self.largest_step, len(step.ids))
        step.attention_calls += 1
        pairs = torch.stack([step.positions, step.ids], -1).double()[:, None]  # [T, 1, 2]
        for write in step.writes:
            write.put(0, pairs, pairs)
        logits = torch.zeros(len(step.wanted), VOCABULARY)
        for row, token in enumerate(step.wanted.tolist()):
            keys = [attention.seen(part, 0, token, None)[0] for part in step.own + step.shared]
            seen = torch.cat(keys)[:, 0].long().tolist()
            logits[row, hash_of([(position, id) for position, id in sorted(map(tuple, seen))])] = 1.0
        return logits


def hash_of(pairs: list[tuple[int, int]]) -> int:
    return hash(tuple(pairs)) % VOCABULARY
