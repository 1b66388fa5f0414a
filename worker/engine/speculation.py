"""Speculative decoding (Leviathan et al. 2023): a step computes drafted tokens beside the last one of a
sequence, and each that is what would have been chosen saves a step.

The token at each position is chosen as always: from the model's own logits, by the request's parameters, with
the draw that seed and position give. The draft goes on while it equals what was chosen. So outputs are, token
for token, those without speculation, and of the model's own distribution.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from worker.engine import device_errors
from worker.engine.drafts import Drafter
from worker.engine.drafts import chances as drafting
from worker.engine.scheduler import Batch
from worker.engine.sequence import Sequence
from worker.engine.types import EngineConfig, Stats

log = logging.getLogger(__name__)
Choose = Callable[[list[Sequence], list[int]], None]


@dataclass(frozen=True)
class Drafted:
    """A draft that was computed: logits from row `first` on are those after the sequence's last token, and
    after each of `tokens`.
    """

    sequence: Sequence
    tokens: list[int]
    first: int


class Speculation:
    """Decides whose next tokens are drafted, how many, and what of them counts."""

    def __init__(self, drafter: Drafter | None, config: EngineConfig, stats: Stats, device: str) -> None:
        self._drafter = drafter
        self._config = config
        self._stats = stats
        self._fixed = drafting.fixed_tokens(device)
        self._chances = drafting.Chances()

    def drafts_among(self, running: int) -> bool:
        """Tell whether tokens may be drafted while so many run."""
        return self._drafter is not None and running < self._config.speculate_below

    def extend(self, batch: Batch, running: Collection[Sequence]) -> Batch:
        """Return a batch with drafts where few run and drafts are expected to pay."""
        if self._drafter is None or not batch.decode or not self.drafts_among(len(running)):
            return batch
        drafts = self._drafts(self._drafter, batch)
        if not drafts:
            return batch
        self._stats.speculative_steps += 1
        for sequence, tokens in drafts.items():
            self._stats.draft_tokens += len(tokens)
            sequence.row.draft_tokens += len(tokens)
        return dataclasses.replace(batch, drafts=drafts)

    def accept(self, drafted: list[Drafted], choose: Choose) -> None:
        """Go on with each draft, whose first token was chosen, while it is what was chosen. `choose` gives
        sequences their next tokens from rows of the logits.
        """
        going, position = drafted, 0
        while going := [each for each in going if self._goes_on(each, position)]:
            position += 1
            try:
                choose([each.sequence for each in going], [each.first + position for each in going])
            except Exception as error:
                if not device_errors.is_out_of_memory(error):
                    raise
                log.info("the rest of drafts is not used: out of memory")
                for each in going:  # the next step computes its last token again
                    _advance(each.sequence, -1)
                return

    def sweep(self, running: Collection[Sequence]) -> None:
        """Let go of what is kept for sequences that do not run any more."""
        if self._drafter is not None:
            self._drafter.keep(running)
            self._stats.draft_kv_bytes_in_use = self._drafter.bytes_in_use

    def stop(self) -> bool:
        """Draft nothing any more and give its memory back; False when there was nothing to stop."""
        stopped = self._drafter is not None
        self._drafter = None
        self._stats.draft_kv_bytes_in_use = 0
        return stopped

    def _drafts(self, drafter: Drafter, batch: Batch) -> dict[Sequence, list[int]]:
        most = [_room(sequence, self._config.speculate_tokens) for sequence in batch.decode]
        fixed = self._fixed + sum(len(chunk.tokens) for chunk in batch.chunks)
        chances = [self._chances.of(sequence) for sequence in batch.decode]
        lengths = drafting.lengths(chances, most, fixed, drafter.cost(len(batch.decode)))
        wanted = {s: length for s, length in zip(batch.decode, lengths, strict=True) if length}
        for sequence in batch.decode:
            if sequence not in wanted:
                self._chances.forgive(sequence)
        try:
            found = drafter.draft(list(wanted), list(wanted.values())) if wanted else []
        except Exception as error:  # whatever a draft model raises, the model itself may well go on
            if device_errors.is_lost(error):
                raise
            log.exception("no drafts any more")
            self.stop()
            return {}
        return {sequence: tokens for sequence, tokens in zip(wanted, found, strict=True) if tokens}

    def _goes_on(self, drafted: Drafted, position: int) -> bool:
        """Tell whether the token of a draft at a position is what was chosen for it: then its KV is there,
        and so are the logits after it.
        """
        sequence, tokens = drafted.sequence, drafted.tokens
        cancelled = sequence.row.dropped and sequence.slot is not None
        if cancelled or position == len(tokens):
            return False
        right = tokens[position] == sequence.tokens[-1]
        self._stats.draft_tokens_accepted += right
        sequence.row.draft_tokens_accepted += right
        self._chances.learn(sequence, right)
        if not right or sequence.slot is None:  # it has ended
            return False
        _advance(sequence, 1)
        return True


def _advance(sequence: Sequence, tokens: int) -> None:
    assert sequence.slot is not None
    sequence.computed += tokens
    sequence.slot.length = sequence.computed - sequence.own_start


def _room(sequence: Sequence, most: int) -> int:
    """Return how many tokens of a draft may be computed: memory is never taken for them."""
    assert sequence.slot is not None
    # A step gives one more token than are right of its draft.
    return max(0, min(most, sequence.slot.capacity - sequence.own_length, sequence.row.tokens_left - 1))
