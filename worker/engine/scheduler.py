"""Who runs next: admission in an order that shares, prefill within a token budget, decode for all who can."""

import bisect
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from worker.engine import kv, lengths, long_slot, pages, prefix, queue_delay
from worker.engine.admission import Admission
from worker.engine.paged_admission import PagedAdmission
from worker.engine.rows import RowState
from worker.engine.sequence import Sequence, distinct_tokens
from worker.engine.step_limits import StepLimits
from worker.engine.types import EngineConfig, Row, Stats

log = logging.getLogger(__name__)
# Beside so many times more that wait already, sequences are put in their places one by one: no new sort.
_FEW_AMONG = 16


@dataclass(frozen=True)
class Chunk:
    """Tokens to prefill: of a prefix node or, as a sequence's own, of a sequence. `first` is the position."""

    target: prefix.Node | Sequence
    tokens: list[int]
    first: int
    last: bool
    """Whether the target has all its KV afterwards."""
    copies: tuple[Sequence, ...] = ()
    """Who has the KV of the target, a node, in its slot as well."""


@dataclass(frozen=True)
class Batch:
    """One step: `decode` sequences compute their last token, `chunks` are prefilled, parents before
    children.
    """

    decode: list[Sequence]
    chunks: list[Chunk]
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """What some of `decode` may go on with, computed beside their last token."""


class Scheduler:
    """Holds waiting and running sequences. Rows are dropped by the engine and swept here at each step."""

    def __init__(
        self,
        memory: kv.Memory | pages.Memory,
        config: EngineConfig,
        stats: Stats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = memory
        self.trie = prefix.Trie(clock, memory.host if isinstance(memory, pages.Memory) else None)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._nodes: list[prefix.Node] = []
        self._lengths = lengths.OutputLengths()
        kind = PagedAdmission if memory.paged else Admission
        self.admission = kind(memory, self.trie, self._lengths, stats)
        self.limits = StepLimits(config.prefill_chunk_tokens, config.max_running)
        self._config = config
        self._stats = stats
        self._clock = clock

    def add(self, rows: Iterable[tuple[Row, RowState]]) -> None:
        """Let rows wait, in the trie with everything else that is known."""
        self._wait([self._sequence(row, state) for row, state in rows])

    def sweep(self) -> None:
        """Let go of what was cancelled or replaced; let those wait that the last step preempted."""
        self._resume()
        for dropped in [s for s in self.waiting if s.row.dropped]:
            self.waiting.remove(dropped)
            self.admission.release(dropped)
        for dropped in [s for s in self.running if s.row.dropped]:
            self.running.remove(dropped)
            self.admission.release(dropped)

    def held_seconds(self) -> float:
        """Return how long waiting sequences may still be held back for company; 0: some may start now."""
        due_in = self._due_in()
        return 0.0 if self._startable(due_in <= 0) else due_in

    def admit(self, admit: Callable[[list[Row]], Iterable[Row]], hold_back: bool = True) -> Sequence | None:
        """Start waiting sequences while there is room; return one that cannot run at all, alone in memory.

        `admit` gets their rows and returns those that may run. What it raises leaves all of them waiting.
        Without `hold_back` none waits for company.
        """
        started: list[Sequence] = []
        nodes: list[prefix.Node] = []
        misfit = None
        startable = self._startable(due=not hold_back or self._due_in() <= 0)
        while len(started) < startable:
            sequence = self._next()
            if sequence is None or not self._may_join(sequence):
                break
            missing = self.admission.try_admit(sequence, self.running)
            if missing is None:
                misfit = None if self.running else sequence
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.state.prepare()
            started.append(sequence)
            nodes += missing
        self._nodes += nodes
        fresh = [s for s in started if not s.preempted]
        try:
            allowed = set(map(id, admit([s.row for s in fresh])))
        except BaseException:  # they are to be as if they had never been started
            for sequence in started:
                self._preempt(sequence)
            self._resume()
            raise
        for sequence in fresh:
            if id(sequence.row) not in allowed:
                self.running.remove(sequence)
                self.admission.release(sequence)
        return misfit

    def _next(self) -> Sequence | None:
        """Return who starts next: nobody whose grammar is being compiled while others would wait for it."""
        ready = (sequence for sequence in self.waiting if not sequence.state.compiling)
        return next(ready, None if self.running else self.waiting[0])

    def next_batch(self) -> Batch | None:
        """Choose what the next step computes; None when nothing can be."""
        budget = self.limits.prefill_tokens
        chunks: list[Chunk] = []
        # A node that lost its KV before it was complete may have been started once more, and one that was
        # split has an upper part that is to be completed first.
        nodes = dict.fromkeys(above for node in self._nodes for above in [*node.upwards()][::-1])
        self._nodes = [node for node in nodes if node.kv is not None and not node.complete]
        for node in self._nodes:
            parent = node.parent
            ready = parent is None or all(n.complete for n in parent.upwards())
            if ready and budget > 0 and self._can_begin(node, chunks):
                chunks.append(_node_chunk(node, budget, () if self.memory.paged else self.running))
                self.trie.in_step.append((node, chunks[-1].first))
                budget -= len(chunks[-1].tokens)
        decode = []
        for sequence in list(self.running):
            if not sequence.uncomputed or sequence.ends_unread or not sequence.prefix_complete():
                continue
            if not self._can_begin(sequence, chunks):
                continue
            if sequence.uncomputed == 1:
                decode.append(sequence)
            elif tokens := self._chunk_tokens(sequence, budget):
                chunks.append(_own_chunk(sequence, tokens))
                budget -= tokens
        alone = bool(chunks) and budget <= 0 and self._prefills_alone(len(decode))
        decode = [] if alone else self._with_room(self.limits.turn(decode, self.running))
        self.trie.in_step = []
        chunks = [chunk for chunk in chunks if not _was_freed(chunk)]
        return Batch(decode, chunks) if decode or chunks else None

    def _prefills_alone(self, decoding: int) -> bool:
        """Tell whether a full chunk is computed without those who decode: they wait for a full batch.

        On a CPU it is, as such a chunk is at the speed of the matrix products already. On a GPU while fewer
        than half of the running requests decode; from then on their tokens come with each chunk for little
        more than the weights that it reads anyway. Not while memory is short: then a step is to be small.
        """
        return not self.memory.paged or self.limits.tight or 2 * decoding < len(self.running)

    def _chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        """Return how many of its own tokens a sequence computes in this step, with room for them."""
        tokens = min(budget, sequence.uncomputed)
        if isinstance(sequence.slot, long_slot.LongSlot):
            tokens = min(tokens, sequence.slot.most_tokens)
        return tokens if tokens > 0 and self.admission.reserve(sequence, sequence.computed + tokens) else 0

    def _can_begin(self, target: prefix.Node | Sequence, chunks: list[Chunk]) -> bool:
        """Tell whether a target's next token can be computed in this step. What begins inside a page takes
        what its parent has in it, before its own first token: after the step that computes the parent.
        """
        if not isinstance(self.memory, pages.Memory):
            return True
        own, parent = _begins(target)
        if not isinstance(own, pages.Run | pages.Slot) or parent is None:
            return True
        assert isinstance(parent.kv, pages.Run)
        copy = self.memory.beginning(own, parent.kv)
        if copy is not None and any(chunk.target is parent for chunk in chunks):
            return False
        self.memory.copies.update(copy or {})
        return True

    def finish(self, sequence: Sequence) -> None:
        """Take an ended sequence out; what it has computed stays in the trie for others."""
        row = sequence.row
        self._lengths.learn(row.request.job, row.max_tokens, len(row.token_ids))
        if self._shares(row):
            self.admission.keep(sequence)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence out and forget its KV."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.admission.release(sequence)

    def _sequence(self, row: Row, state: RowState) -> Sequence:
        root, tokens = row.request.root, list(row.request.prompt_ids)
        if not self._shares(row):
            root = f"{root}\0{row.id}"
        node = self.trie.insert(root, tokens)
        expected = self._lengths.expected(row.request.job, row.max_tokens)
        # Long expected outputs first, for a short tail.
        return Sequence(row, state, root, node, -expected.bit_length(), tokens, self._clock())

    def _shares(self, row: Row) -> bool:
        return self._config.share_prefixes and not row.request.sampling.prompt_logprobs

    def _due_in(self) -> float:
        """Return after how many seconds a waiting sequence will have waited as long as it may."""
        delay = self._config.max_queue_delay_seconds
        if not delay or not self.waiting:
            return 0.0
        return min(sequence.arrived for sequence in self.waiting) + delay - self._clock()

    def _startable(self, due: bool) -> int:
        return queue_delay.startable(len(self.waiting), len(self.running), due, self._config)

    def _may_join(self, sequence: Sequence) -> bool:
        """Tell whether the running batch stays within max_batch_tokens with one more; one always runs."""
        most = self._config.max_batch_tokens
        return most is None or not self.running or distinct_tokens([*self.running, sequence]) <= most

    def _with_room(self, decode: list[Sequence]) -> list[Sequence]:
        """Grow slots that are full; preempt sequences when memory does not suffice, those with least
        to lose.
        """
        for sequence in decode:
            while sequence.slot is not None and not self.admission.grow(sequence, self.running):
                victim = min(self.running[::-1], key=lambda s: len(s.row.token_ids))
                self._stats.preemptions += 1
                log.info("preempted", extra={"request": victim.row.id, "tokens": len(victim.tokens)})
                self._preempt(victim)
        for sequence in decode:
            if sequence.slot is not None:
                sequence.slot.length = sequence.own_length
                sequence.computed += 1
        return [s for s in decode if s.slot is not None]

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence out, to go back in front of the waiting ones; all of its own is computed
        again later.
        """
        self.running.remove(sequence)
        sequence.recomputes_until = max(sequence.recomputes_until, sequence.computed)
        if sequence.slot is not None:
            sequence.slot.release()
            sequence.slot = None
        self._preempted.append(sequence)

    def _resume(self) -> None:
        """Let preempted sequences wait, with what they have sampled in the trie. Not when they are preempted:
        a node of which the step has a chunk might be split.
        """
        preempted, self._preempted = self._preempted, []
        for sequence in preempted:
            old = sequence.node
            sequence.node = self.trie.insert(sequence.root, sequence.tokens)
            self._wait([sequence])
            self.trie.unpin(old)

    def _wait(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.trie.pin(sequence.node)
        if len(sequences) * _FEW_AMONG < len(self.waiting):
            for sequence in sequences:
                bisect.insort(self.waiting, sequence, key=Sequence.order)
        else:
            self.waiting += sequences
            self.waiting.sort(key=Sequence.order)


def _was_freed(chunk: Chunk) -> bool:
    """Tell whether a preemption has taken the memory that a chunk was to be written to."""
    target = chunk.target
    return (target.kv if isinstance(target, prefix.Node) else target.slot) is None


def _begins(target: prefix.Node | Sequence) -> tuple[object, prefix.Node | None]:
    """Return the KV of a target of which no token is computed yet, and its parent."""
    if isinstance(target, Sequence):
        return (target.slot, target.parent) if target.computed == target.own_first else (None, None)
    parent = target.parent
    return (target.kv, parent) if not target.computed and parent and parent.tokens else (None, None)


def _node_chunk(node: prefix.Node, budget: int, running: Iterable[Sequence]) -> Chunk:
    tokens = node.tokens[node.computed : node.computed + budget]
    first = node.start + node.computed
    node.computed += len(tokens)
    copies = tuple(s for s in running if s.slot is not None and s.copies(node))
    for sequence in copies:
        assert sequence.slot is not None
        sequence.slot.length = first + len(tokens) - sequence.own_start
    return Chunk(node, tokens, first, node.complete, copies)


def _own_chunk(sequence: Sequence, budget: int) -> Chunk:
    first = sequence.computed
    tokens = sequence.tokens[first : first + budget]
    assert sequence.slot is not None
    sequence.computed += len(tokens)
    sequence.slot.length = sequence.computed - sequence.own_start
    return Chunk(sequence, tokens, first, not sequence.uncomputed)
