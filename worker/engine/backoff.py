"""What the engine does with a step that is out of memory: as if it had not been, and smaller ones after it.

The scheduler plans the same tokens again, within limits that are halved until they fit. What the step wrote
is written again. Giving KV back would not help: pages are one block, and so are storages, taken once.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from worker.engine import device_errors, pages
from worker.engine.scheduler import Batch, Chunk, Scheduler
from worker.engine.sequence import Sequence

log = logging.getLogger(__name__)
Result = TypeVar("Result")


def tried(compute: Callable[[], Result]) -> Result | None:
    """Return what `compute` does; None when it was out of memory: what torch keeps unused is given back
    then.
    """
    try:
        return compute()
    except Exception as error:
        if not device_errors.is_out_of_memory(error):
            raise
        log.info("out of memory", extra={"reason": str(error).split("\n")[0]})
    # Only here: the traceback of the error held the tensors of the step.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def take_back(batch: Batch, scheduler: Scheduler) -> None:
    """Make it so that a batch was never planned."""
    if isinstance(scheduler.memory, pages.Memory):
        scheduler.memory.copies = {}  # all are for who begins with this batch, and planned again with it
    for sequence in batch.decode:
        _rewind(sequence, sequence.computed - 1)
    for chunk in reversed(batch.chunks):  # of two in one slot, the earlier one says where it ends
        _take_back_chunk(chunk)


def alone(batch: Batch, scheduler: Scheduler) -> Sequence:
    """Return for whom the only token of a batch was."""
    target = batch.decode[0] if batch.decode else batch.chunks[0].target
    if isinstance(target, Sequence):
        return target
    known = (*scheduler.running, *scheduler.waiting)
    return next(sequence for sequence in known if target in sequence.node.upwards())


def _take_back_chunk(chunk: Chunk) -> None:
    target = chunk.target
    if isinstance(target, Sequence):
        _rewind(target, chunk.first)
        return
    target.computed, target.logits = chunk.first - target.start, None
    for other in chunk.copies:
        if other.slot is not None:
            other.slot.length = chunk.first - other.own_start


def _rewind(sequence: Sequence, computed: int) -> None:
    assert sequence.slot is not None
    sequence.computed = computed
    sequence.slot.length = computed - sequence.own_start
