"""From what the scheduler chose to the tensors of one step."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from worker.engine import kv, prefix
from worker.engine.paged_step import PagedStep
from worker.engine.scheduler import Batch, Chunk
from worker.engine.sequence import Sequence
from worker.engine.speculation import Drafted
from worker.engine.step import Part, Step, Write

_Places = slice | list[int]
"""Which of the packed tokens: a range, or their indices, here on the host."""


@dataclass(frozen=True)
class Scored:
    """Rows of a step's logits that score a prompt: those after its tokens from position `first` on."""

    sequence: Sequence
    first: int
    rows: slice


@dataclass(frozen=True)
class Packed:
    """A step and, for each row of its logits, whose last token it is; None: it is one in `scored` or, after
    the first, in `drafted`.
    """

    step: Step | PagedStep
    ends: list[Sequence | prefix.Node | None]
    scored: list[Scored]
    drafted: list[Drafted]


def pack(batch: Batch, device: torch.device, cascade: bool = True) -> Packed:
    """Pack decoding sequences, then the chunks. Without `cascade` nobody shares a part with
    others.
    """
    packer = _Packer(device)
    plain = [sequence for sequence in batch.decode if sequence not in batch.drafts]
    if plain:
        packer.decode(sorted(plain, key=_place))
    for sequence, tokens in batch.drafts.items():
        packer.draft(sequence, tokens)
    for chunk in batch.chunks:
        packer.prefill(chunk)
    return packer.packed(cascade)


class _Packer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._wanted: list[int] = []
        self._ends: list[Sequence | prefix.Node | None] = []
        self._scored: list[Scored] = []
        self._drafted: list[Drafted] = []
        self._writes: list[Write] = []
        self._spans: list[tuple[slice, dict[str, Any]]] = []
        self._earlier: list[tuple[slice, dict[str, Any]]] = []
        self._on_node: dict[prefix.Node, list[slice]] = {}

    def decode(self, sequences: list[Sequence]) -> None:
        """Add the last token of sequences."""
        tokens = slice(len(self._ids), len(self._ids) + len(sequences))
        for at, sequence in enumerate(sequences, tokens.start):
            self._ids.append(sequence.tokens[-1])
            self._positions.append(len(sequence.tokens) - 1)
            self._wanted.append(at)
            self._ends.append(sequence)
            self._sits_on(sequence.prefix_nodes(), slice(at, at + 1))
        own = [sequence.own_length for sequence in sequences]
        sources = [_slot(sequence).storage for sequence in sequences]
        self._writes.append(Write(tokens, sources, at=self._tensor(own) - 1))
        fields = {"sources": sources, "first": 0, "length": max(own), "lengths": own}
        fields |= {"start": self._tensor([sequence.own_start for sequence in sequences])}
        self._spans.append((tokens, fields | {"all_seen": min(own) == max(own)}))

    def prefill(self, chunk: Chunk) -> None:
        """Add a run of tokens of one node or sequence."""
        target = chunk.target
        tokens = slice(len(self._ids), len(self._ids) + len(chunk.tokens))
        self._ids += chunk.tokens
        self._positions += range(chunk.first, chunk.first + len(chunk.tokens))
        if isinstance(target, prefix.Node):
            run, start = _run(target), target.start
            source, first = run.storage, run.first
            above = list(target.upwards())[:0:-1]
        else:
            source, first, start = _slot(target).storage, 0, target.own_start
            above = target.prefix_nodes()
        self._sits_on(above, tokens)
        before = chunk.first - start
        self._writes.append(Write(tokens, [source], first + before))
        for other in chunk.copies:
            if isinstance(other.slot, kv.Slot):  # else preempted since
                self._writes.append(Write(tokens, [other.slot.storage], chunk.first - other.own_start))
        fields: dict[str, Any] = {"sources": [source], "first": first + before, "length": len(chunk.tokens)}
        self._spans.append((tokens, fields | {"start": chunk.first, "triangular": True}))
        if before:
            fields |= {"first": first, "length": before}
            self._earlier.append((tokens, fields | {"start": start, "all_seen": True}))
        if isinstance(target, Sequence) and target.scored:
            self._score(target, chunk, tokens.start)
        if chunk.last and (isinstance(target, Sequence) or target.ends):
            self._wanted.append(tokens.stop - 1)
            self._ends.append(target)

    def draft(self, sequence: Sequence, tokens: list[int]) -> None:
        """Add the last token of a sequence and those that may follow it; want the logits after each."""
        at, first = len(self._ids), len(sequence.tokens) - 1
        self.prefill(Chunk(sequence, [sequence.tokens[-1], *tokens], first, last=False))
        self._drafted.append(Drafted(sequence, tokens, len(self._wanted)))
        self._wanted += range(at, len(self._ids))
        self._ends += [sequence] + [None] * len(tokens)

    def _score(self, sequence: Sequence, chunk: Chunk, at: int) -> None:
        """Want the logits after each token of a chunk that another token of the prompt follows."""
        count = min(len(chunk.tokens), sequence.prompt_length - 1 - chunk.first)
        if count > 0:
            rows = slice(len(self._wanted), len(self._wanted) + count)
            self._scored.append(Scored(sequence, chunk.first, rows))
            self._wanted += range(at, at + count)
            self._ends += [None] * count

    def packed(self, cascade: bool) -> Packed:
        positions = self._tensor(self._positions)
        own = [self._part(tokens, positions, fields) for tokens, fields in self._spans]
        places: list[_Places] = [tokens for tokens, _ in self._earlier]
        shared = [self._part(tokens, positions, fields) for tokens, fields in self._earlier]
        fields: dict[str, Any]
        for node, slices in self._on_node.items():
            run = _run(node)
            fields = {"sources": [run.storage], "first": run.first, "length": len(node.tokens)}
            fields |= {"start": node.start, "all_seen": True}
            for tokens in [_joined(slices)] if cascade else slices:
                places.append(tokens)
                shared.append(self._part(tokens, positions, fields))
        _mark_last(shared, places, len(self._ids))
        step = Step(self._tensor(self._ids), positions, self._tensor(self._wanted), self._writes, own, shared)
        return Packed(step, self._ends, self._scored, self._drafted)

    def _sits_on(self, nodes: list[prefix.Node], tokens: slice) -> None:
        for node in nodes:
            self._on_node.setdefault(node, []).append(tokens)

    def _part(self, places: _Places, positions: Tensor, fields: dict[str, Any]) -> Part:
        tokens = places if isinstance(places, slice) else self._tensor(places)
        return Part(tokens=tokens, positions=positions[tokens], **fields)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)


def _joined(slices: list[slice]) -> _Places:
    """Return one range where the ranges adjoin, else all indices."""
    if all(a.stop == b.start for a, b in pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    return [at for tokens in slices for at in range(tokens.start, tokens.stop)]


def _mark_last(parts: list[Part], places: list[_Places], tokens: int) -> None:
    later = np.zeros(tokens, dtype=np.bool_)
    for part, at in zip(reversed(parts), reversed(places), strict=True):
        part.last = not later[at].any()
        later[at] = True


def _slot(sequence: Sequence) -> kv.Slot:
    assert isinstance(sequence.slot, kv.Slot)
    return sequence.slot


def _run(node: prefix.Node) -> kv.Run:
    assert isinstance(node.kv, kv.Run)
    return node.kv


def _place(sequence: Sequence) -> tuple[int, int]:
    """Return what brings those together that can be read as one stack."""
    address, capacity = _slot(sequence).storage.row
    return capacity, address
