"""One step ahead of the device: the next step is launched before the tokens of the last one are read.

Until then a token is `UNREAD` among those of its sequence. The next step takes it from where it was chosen,
and nobody needs to know it but the host, which learns one step late that a sequence has ended: what was
computed for it meanwhile is void. Sequences whose next token the host must choose make all wait.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engine import sampling, sampling_ahead
from worker.engine.device import Device, Fetch
from worker.engine.paged_step import PagedStep
from worker.engine.sequence import Sequence

UNREAD = -1


@dataclass(frozen=True, eq=False)
class Flight:
    """The tokens that a step chose for sequences: `ids` [S] int64 on the device, and on their way here."""

    sequences: list[Sequence]
    ids: Tensor
    _fetch: Fetch

    def wait(self) -> list[int]:
        """Return the tokens once they are here: UNREAD for those that the host must choose."""
        return self._fetch.wait().tolist()

    def tokens(self, ids: list[int]) -> Iterator[tuple[Sequence, int]]:
        """Put what `wait` returned into the sequences; yield each that has a token more, with it.

        Leaves out what is void, and who has none yet: that is as it was before the step that gave it.
        """
        for sequence, id in zip(self.sequences, ids, strict=True):
            if not sequence.unread or sequence.row.dropped:
                continue
            if id == UNREAD:
                _put_back(sequence)
            else:
                sequence.tokens[-sequence.unread] = id
                sequence.unread -= 1
                yield sequence, id


@torch.inference_mode()
def launch(sequences: list[Sequence], logits: Tensor, device: Device) -> Flight:
    """Choose the next token of each from its logits [S, V], and leave it unread."""
    samplings = [sequence.row.request.sampling for sequence in sequences]
    positions = [len(sequence.row.token_ids) + sequence.unread for sequence in sequences]
    ids, doubtful = sampling_ahead.chosen(logits, sampling_ahead.Plan.of(samplings, positions, device.stage))
    fetch = device.fetch(torch.where(doubtful, UNREAD, ids))  # whatever raises, raises before they have one
    for sequence in sequences:
        sequence.tokens.append(UNREAD)
        sequence.unread += 1
    return Flight(sequences, ids, fetch)


@torch.inference_mode()
def carry(flight: Flight, decode: list[Sequence], step: PagedStep, device: Device) -> None:
    """Give a step the tokens that its first rows, those of `decode`, have unread."""
    row_of = {sequence: row for row, sequence in enumerate(flight.sequences)}
    pairs = [(row_of[sequence], at) for at, sequence in enumerate(decode) if sequence.unread]
    if pairs:
        sources, targets = device.stage(np.array(pairs, dtype=np.int64).T).unbind()
        step.ids.index_copy_(0, targets, flight.ids.index_select(0, sources))


def drop_unread(sequence: Sequence) -> None:
    """Forget the unread tokens of a sequence that has ended, and what was computed of them."""
    if sequence.unread:
        del sequence.tokens[-sequence.unread :]
        sequence.unread = 0
    sequence.computed = min(sequence.computed, len(sequence.tokens) - 1)


def waits_for_host(sequence: Sequence) -> bool:
    """Tell whether the next token of a sequence needs something that only the host has."""
    state, wanted = sequence.state, sequence.row.request.sampling
    return (
        sequence.doubted
        or wanted.logprobs is not None
        or wanted.top_k > sampling.FIRST_CANDIDATES
        or state.failure is not None
        or state.unscored
        or state.changes_logits
    )


def needed_pages(running: Iterable[Sequence]) -> int:
    """Return how many pages the running sequences take if each decodes once more."""
    slots = [sequence.slot for sequence in running if sequence.slot is not None]
    return sum(slot.length >= slot.capacity for slot in slots)


def _put_back(sequence: Sequence) -> None:
    """Undo the unread tokens of a sequence: the step that gave the first is to be computed again."""
    del sequence.tokens[-sequence.unread :]
    sequence.unread, sequence.doubted = 0, True
    again = bool(sequence.own_tokens)  # else its logits are those of a prefix, which are there
    sequence.recomputes_until = max(sequence.recomputes_until, sequence.computed)
    sequence.computed = len(sequence.tokens) - again
    assert sequence.slot is not None
    sequence.slot.length = sequence.computed - sequence.own_start
