"""What memory allows: how fast it is read, and what a decode step has to read of a model."""

import time
from typing import Any

import torch
from torch import Tensor

from worker.engine.quantize.linear import IntLinear

_BYTES = 1 << 30
_TRIES = 5
_ROW = 1024


def read_bytes_per_second() -> float:
    """Return how fast torch's threads read a GiB that lies in a row: the best of a few tries.

    Sums and products with a vector, of which one or the other is the faster on a CPU. It is more than caches
    hold.
    """
    numbers = torch.ones(_BYTES // 4 // _ROW, _ROW)
    vector, out = torch.ones(_ROW), torch.empty(numbers.shape[0])
    ways = (lambda: numbers.sum(), lambda: torch.mv(numbers, vector, out=out))
    return numbers.nbytes / min(_seconds(way) for way in ways for _ in range(_TRIES))


def _seconds(way: Any) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def step_bytes(model: Any) -> int:
    """Return the bytes of the weights that a decode step reads: all, but of embeddings only a few rows.

    A head that shares the embeddings' weight reads it whole.
    """
    head = model.get_output_embeddings()
    looked_up = model.get_input_embeddings().weight
    shared = head is not None and getattr(head, "weight", None) is looked_up
    read: dict[int, Tensor] = {id(each): each for each in model.parameters()}
    if not shared:
        read.pop(id(looked_up), None)
    integers = sum(each.grouped.nbytes for each in model.modules() if isinstance(each, IntLinear))
    return integers + sum(each.nbytes for each in read.values())
