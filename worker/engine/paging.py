"""From what the scheduler chose to the tensors of one step over pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.engine import cascade, long_slot, pages, prefix
from worker.engine.packing import Packed, Scored
from worker.engine.paged_step import Own, PagedStep, Piece, Rows, Shared, Streamed
from worker.engine.scheduler import Batch, Chunk
from worker.engine.sequence import Sequence as Request
from worker.engine.speculation import Drafted

Stage = Callable[[NDArray[Any]], Tensor]


@dataclass(frozen=True)
class _Row:
    """A run of tokens of one table, from position `first` on; it may share its first `shared` pages, or have
    those of `long` in host memory.
    """

    tokens: list[int]
    first: int
    table: cascade.Table
    shared: int
    long: long_slot.LongSlot | None = None

    @property
    def end(self) -> int:
        return self.first + len(self.tokens)

    @property
    def moved(self) -> int:
        """How many of its first pages are not there."""
        return self.long.moved if self.long is not None else 0


class Packer:
    """Packs steps over the pages of one memory. `stage` brings arrays to the device.

    Without `cascades` every row reads all its pages. `windows`: some layer has a window, and needs that too.
    """

    def __init__(self, memory: pages.Memory, stage: Stage, windows: bool, cascades: bool = True) -> None:
        self._memory = memory
        self._stage = stage
        self._windows = windows
        self._cascades = cascades
        self.least_saved = cascade.LEAST_SAVED_PAGES
        self._planned: tuple[list[bytes], list[cascade.Segment]] | None = None

    def pack(self, batch: Batch) -> Packed:
        """Pack decoding sequences, those with drafts, then the chunks."""
        plain = [sequence for sequence in batch.decode if sequence not in batch.drafts]
        rows = [self._decode(sequence) for sequence in plain]
        rows += [self._decode(sequence, tokens) for sequence, tokens in batch.drafts.items()]
        rows += [self._chunk(chunk) for chunk in batch.chunks]
        wanted = _Wanted(plain, batch)
        segments = self._segments(rows)
        there = [row.moved for row in rows]
        first_pages = [*map(max, there, cascade.starts(segments, len(rows)))]
        decodes = len(plain)
        own = self._own(rows, decodes, first_pages)
        whole = self._own(rows, decodes, there) if segments and self._windows else own
        positions = np.concatenate([np.arange(row.first, row.end) for row in rows])
        ids = np.concatenate([np.array(row.tokens, dtype=np.int64) for row in rows])
        size = self._memory.page_tokens
        slots = (
            np.concatenate([row.table[np.arange(row.first, row.end) // size] for row in rows])
            * np.int64(size)
            + positions % size
        )
        step = PagedStep(
            pool=self._memory.pool,
            ids=self._stage(ids),
            positions=self._stage(positions),
            wanted=self._stage(np.array(wanted.tokens, dtype=np.int64)),
            slots=self._stage(slots),
            whole=whole,
            own=own,
            shared=self._shared(segments, rows) if segments else None,
            copies=self._copies(),
            streamed=self._streamed(rows),
        )
        return Packed(step, wanted.ends, wanted.scored, wanted.drafted)

    def _decode(self, sequence: Request, drafted: Sequence[int] = ()) -> _Row:
        slot = sequence.slot
        assert isinstance(slot, pages.Slot)
        shared = slot.start // self._memory.page_tokens
        tokens = [sequence.tokens[-1], *drafted]
        return _Row(tokens, len(sequence.tokens) - 1, slot.table, shared, _long(slot))

    def _chunk(self, chunk: Chunk) -> _Row:
        target, size = chunk.target, self._memory.page_tokens
        if isinstance(target, prefix.Node):
            runs = [node.kv for node in [*target.upwards()][::-1] if isinstance(node.kv, pages.Run)]
            table, shared = np.array(pages.table_of(runs, size), dtype=np.int32), target.start // size
        else:
            assert isinstance(target.slot, pages.Slot)
            table, shared = target.slot.table, target.slot.start // size
            return _Row(chunk.tokens, chunk.first, table, shared, _long(target.slot))
        return _Row(chunk.tokens, chunk.first, table, shared)

    def _segments(self, rows: Sequence[_Row]) -> list[cascade.Segment]:
        """Return what is read once for several rows; while these stay the same, what was found before."""
        if not self._cascades:
            return []
        tables = [row.table[: row.shared] for row in rows]
        key = [table.tobytes() for table in tables]
        if self._planned is None or self._planned[0] != key:
            self._planned = key, cascade.plan(tables, self.least_saved)
        return self._planned[1]

    def _own(self, rows: Sequence[_Row], decodes: int, first_pages: Sequence[int]) -> Own:
        """Return the rows with their keys from a page of each on."""
        size = self._memory.page_tokens
        cut = [
            (len(row.tokens), row.end - first * size, row.table[first : -(-row.end // size)])
            for row, first in zip(rows, first_pages, strict=True)
        ]
        decode = self._rows(cut[:decodes]) if decodes else None
        return Own(decodes, decode, self._rows(cut[decodes:]) if cut[decodes:] else None)

    def _shared(self, segments: Sequence[cascade.Segment], rows: Sequence[_Row]) -> Shared:
        size = self._memory.page_tokens
        firsts = np.cumsum([0, *(len(row.tokens) for row in rows)])
        pieces = [
            piece
            for segment in segments
            for piece in segment.pieces(sum(len(rows[row].tokens) for row in segment.rows))
        ]
        members = [np.concatenate([np.arange(firsts[r], firsts[r + 1]) for r in p.rows]) for p in pieces]
        cut = [
            (len(queries), (p.last - p.first) * size, rows[p.rows[0]].table[p.first : p.last])
            for p, queries in zip(pieces, members, strict=True)
        ]
        queries = np.concatenate(members)
        return Shared(self._rows(cut), self._stage(queries), self._stage(_places(queries, int(firsts[-1]))))

    def _streamed(self, rows: Sequence[_Row]) -> Streamed | None:
        """Return what the one row that runs without sharing has in host memory."""
        at = next((at for at, row in enumerate(rows) if row.moved), None)
        if at is None:
            return None
        row, first = rows[at], sum(len(row.tokens) for row in rows[:at])
        slot, host, size = row.long, self._memory.host, self._memory.page_tokens
        assert slot is not None
        assert host is not None
        count = len(slot.staging) // 2
        buffers = cycle((slot.staging[:count], slot.staging[count:]))
        known: dict[tuple[int, ...], Rows] = {}
        pieces = []
        for begin in range(0, slot.moved, count):
            hosted = slot.hosted[begin : begin + count]
            buffer = next(buffers)[: len(hosted)]
            cut = [(len(row.tokens), len(buffer) * size, np.array(buffer, dtype=np.int32))]
            same = known.get(tuple(buffer)) or known.setdefault(tuple(buffer), self._rows(cut))
            pieces.append(Piece(same, partial(host.bring, host_pages=hosted, device_pages=buffer)))
        return Streamed(first, first + len(row.tokens), slot.moved * size, pieces)

    def _rows(self, cut: Sequence[tuple[int, int, cascade.Table]]) -> Rows:
        """Return rows of (queries, keys, pages)."""
        queries, keys = [row[0] for row in cut], [row[1] for row in cut]
        tables = np.zeros((len(cut), max(len(row[2]) for row in cut)), dtype=np.int32)
        for at, (_, _, table) in enumerate(cut):
            tables[at, : len(table)] = table
        lengths = np.array(keys, dtype=np.int32)
        starts, ends = self._stage(_sums(queries)), self._stage(_sums(keys))
        return Rows(starts, ends, self._stage(lengths), self._stage(tables), max(queries), max(keys))

    def _copies(self) -> tuple[Tensor, Tensor] | None:
        """Take what is to be copied before the step."""
        copies, self._memory.copies = self._memory.copies, {}
        if not copies:
            return None
        size = self._memory.page_tokens
        counts = [count for _, count in copies.values()]
        places = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
        sources = np.repeat([source * size for source, _ in copies.values()], counts) + places
        targets = np.repeat([target * size for target in copies], counts) + places
        return self._stage(sources), self._stage(targets)


class _Wanted:
    """Which packed tokens' logits are needed, and for whom."""

    def __init__(self, plain: list[Request], batch: Batch) -> None:
        self.tokens: list[int] = list(range(len(plain)))
        self.ends: list[Request | prefix.Node | None] = list(plain)
        self.scored: list[Scored] = []
        self.drafted: list[Drafted] = []
        at = len(plain)
        for sequence, drafted in batch.drafts.items():
            self.drafted.append(Drafted(sequence, drafted, len(self.tokens)))
            self.tokens += range(at, at + 1 + len(drafted))
            self.ends += [sequence] + [None] * len(drafted)
            at += 1 + len(drafted)
        for chunk in batch.chunks:
            self._add(chunk, at)
            at += len(chunk.tokens)

    def _add(self, chunk: Chunk, at: int) -> None:
        target = chunk.target
        if isinstance(target, Request) and target.scored:
            count = min(len(chunk.tokens), target.prompt_length - 1 - chunk.first)
            if count > 0:
                self.scored.append(
                    Scored(target, chunk.first, slice(len(self.tokens), len(self.tokens) + count))
                )
                self.tokens += range(at, at + count)
                self.ends += [None] * count
        if chunk.last and (isinstance(target, Request) or target.ends):
            self.tokens.append(at + len(chunk.tokens) - 1)
            self.ends.append(target)


def _long(slot: pages.Slot) -> long_slot.LongSlot | None:
    return slot if isinstance(slot, long_slot.LongSlot) else None


def _sums(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)


def _places(queries: NDArray[Any], tokens: int) -> NDArray[np.int64]:
    """Return where each token is among the queries [tokens, most times]; -1 fills up."""
    order = np.argsort(queries, kind="stable")
    counts = np.bincount(queries, minlength=tokens)
    places = np.full((tokens, counts.max()), -1, dtype=np.int64)
    nth = np.arange(len(queries)) - np.repeat(np.cumsum(counts) - counts, counts)
    places[queries[order], nth] = order
    return places
