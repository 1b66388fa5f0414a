"""Drafts of a smaller model of the same vocabulary (Leviathan et al. 2023)."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine import kv, packing, prefix, runner, sampling
from worker.engine.scheduler import Batch, Chunk
from worker.engine.sequence import Sequence
from worker.engine.types import Request, Row, Sampling

_NOWHERE = prefix.Node([], 0, None)


@dataclass(frozen=True)
class Limits:
    """What a draft model may use and knows: bytes of KV, tokens in one of its steps, positions, token ids
    below `vocabulary`. Those of the model itself are below `target_vocabulary`.
    """

    kv_memory_bytes: int
    step_tokens: int
    context_tokens: int
    vocabulary: int
    target_vocabulary: int


@dataclass(frozen=True)
class Cost:
    """How long steps take: `share` of a step of the model itself, which takes as long as `fixed` tokens and 1
    more for each.
    """

    share: float
    fixed: float


@dataclass(eq=False)
class Twin(Sequence):
    """A sequence as the draft model has it: with tokens that it drafted, and KV in a slot of its memory."""

    same: int = 0
    """So many of its tokens are known to be those of the sequence."""

    def follow(self, tokens: list[int]) -> None:
        """Become so many tokens; what was computed of other ones is written over."""
        same = self.same
        while same < min(len(tokens), len(self.tokens)) and tokens[same] == self.tokens[same]:
            same += 1
        self.tokens[same:] = tokens[same:]
        # The last one is computed once more if need be: what follows it is wanted.
        self.computed = min(self.computed, same, len(tokens) - 1)
        self.same = len(tokens)


class DraftModel:
    """Runs a small model ahead of the one that is asked, with KV of its own.

    It draws with the number that decides the draw of the token itself, by seed and position: where the two
    models agree about a distribution, so do their draws. It knows nothing of penalties, biases and grammars.
    """

    def __init__(self, model: runner.Runner, limits: Limits, cost: Cost) -> None:
        self._runner = model
        self._limits = limits
        self._memory = kv.Memory(model.layout, limits.kv_memory_bytes, model.reads_beyond)
        self._cost = cost
        self._twins: dict[Sequence, Twin] = {}

    @property
    def bytes_in_use(self) -> int:
        """See Drafter."""
        return self._memory.used

    def cost(self, sequences: int) -> float:
        """See Drafter."""
        return self._cost.share * (self._cost.fixed + sequences) / sequences

    def keep(self, running: Collection[Sequence]) -> None:
        """See Drafter."""
        for sequence in self._twins.keys() - set(running):
            twin = self._twins.pop(sequence)
            if twin.slot is not None:
                twin.slot.release()

    def draft(self, sequences: list[Sequence], most: list[int]) -> list[list[int]]:
        """See Drafter. A long prompt takes several calls, and has no draft before the last one."""
        followed = {s: count for s, count in zip(sequences, most, strict=True) if self._follow(s, count)}
        ready = self._catch_up(list(followed))
        for position in range(1, max(most, default=0)):
            ready = [sequence for sequence in ready if followed[sequence] > position]
            if not ready:
                break
            self._step(ready, Batch([self._advanced(sequence) for sequence in ready], []))
        return [self._drafted(sequence) for sequence in sequences]

    def _follow(self, sequence: Sequence, most: int) -> bool:
        """Bring a sequence's twin up to it; False when it can have no draft."""
        if sequence not in self._twins:
            row = Row(Request(sequence.row.id, [], Sampling(1)))
            self._twins[sequence] = Twin(row, sequence.state, "", _NOWHERE, 0)
        twin = self._twins[sequence]
        twin.follow(sequence.tokens)
        tokens = len(twin.tokens) + most
        known = max(twin.tokens[twin.computed :]) < self._limits.vocabulary
        return known and tokens <= self._limits.context_tokens and self._has_room(twin, tokens)

    def _has_room(self, twin: Twin, tokens: int) -> bool:
        if twin.slot is not None and tokens <= twin.slot.capacity:
            return True
        if not self._memory.fits(kv.capacity_of(tokens)):
            return False
        if twin.slot is None:
            twin.slot = self._memory.slot(tokens)
        else:
            assert isinstance(twin.slot, kv.Slot)
            twin.slot.length = twin.computed
            twin.slot = twin.slot.moved(tokens)
        return True

    def _catch_up(self, sequences: list[Sequence]) -> list[Sequence]:
        """Compute what of sequences is not yet, as far as one step goes; return those that have a token
        drafted then.
        """
        chunks: list[Chunk] = []
        ready, budget = [], self._limits.step_tokens
        for sequence in sequences:
            twin = self._twins[sequence]
            tokens = twin.tokens[twin.computed : twin.computed + budget]
            if not tokens:
                break
            budget -= len(tokens)
            chunks.append(Chunk(twin, tokens, twin.computed, len(tokens) == twin.uncomputed))
            twin.computed += len(tokens)
            if chunks[-1].last:
                ready.append(sequence)
        if chunks:
            self._step(ready, Batch([], chunks))
        return ready

    def _advanced(self, sequence: Sequence) -> Sequence:
        twin = self._twins[sequence]
        twin.computed += 1
        return twin

    def _step(self, sequences: list[Sequence], batch: Batch) -> None:
        """Compute a step that ends the given sequences' twins, and draft a token for each."""
        packed = packing.pack(batch, self._runner.layout.device, cascade=False)
        logits = self._runner.step(packed.step)
        row_of = {end: row for row, end in enumerate(packed.ends)}
        rows = [row_of[self._twins[sequence]] for sequence in sequences]
        chosen = self._choose(sequences, logits[torch.tensor(rows, dtype=torch.long, device=logits.device)])
        for sequence, token_id in zip(sequences, chosen, strict=True):
            self._twins[sequence].tokens.append(token_id)

    def _choose(self, sequences: list[Sequence], logits: Tensor) -> list[int]:
        """Return the token of each row of logits [R, V]: the highest, or the one that is drawn."""
        chosen: list[int] = logits.argmax(-1).tolist()
        finite = logits.amax(-1).isfinite().tolist()
        drawn = [row for row, s in enumerate(sequences) if finite[row] and not _sampling(s).greedy]
        if drawn:
            wanted = [_sampling(sequences[row]) for row in drawn]
            positions = [self._position(sequences[row]) for row in drawn]
            found = sampling.draw(logits[drawn], sampling.Parameters.of(wanted, logits.device), positions)
            for row, token_id in zip(drawn, found.tolist(), strict=True):
                chosen[row] = token_id
        return chosen

    def _position(self, sequence: Sequence) -> int:
        """Return the position in the output of the token that is drafted next."""
        drafted = len(self._twins[sequence].tokens) - len(sequence.tokens)
        return len(sequence.row.token_ids) + drafted

    def _drafted(self, sequence: Sequence) -> list[int]:
        """Return what is drafted, up to an id that is no token of the model itself."""
        drafted = self._twins[sequence].tokens[len(sequence.tokens) :]
        unknown = (i for i, id in enumerate(drafted) if id >= self._limits.target_vocabulary)
        return drafted[: next(unknown, len(drafted))]


def _sampling(sequence: Sequence) -> Sampling:
    return sequence.row.request.sampling
