"""Which waiting requests join the running ones: as many as memory holds at the outputs that are expected."""

from typing import Any

from worker.engine import kv, lengths, prefix
from worker.engine.sequence import Sequence
from worker.engine.types import Stats

# Attending to a prefix node costs a fixed time per layer, as much as reading so many tokens in slots.
_WORTH_A_PART = 1024
# A storage stays with the nodes that take it over, if so much of it is theirs.
_LEAST_KEPT = 2 / 3


class Admission:
    """Gives sequences their prefix nodes and slots, and takes these back."""

    def __init__(self, memory: Any, trie: prefix.Trie, expected: lengths.OutputLengths, stats: Stats) -> None:
        self.worth_a_part = _WORTH_A_PART
        self._memory = memory
        self._trie = trie
        self._lengths = expected
        self._stats = stats

    def try_admit(self, sequence: Sequence, running: list[Sequence]) -> list[prefix.Node] | None:
        """Allocate what a sequence needs; return the nodes that are now to be computed. None: no memory for
        it.
        """
        sequence.own_first = self._own_first(sequence)
        sequence.own_start = self._slot_start(sequence)
        nodes = prefix.path(sequence.node, sequence.own_first)
        missing = [node for node in nodes if node.kv is None]
        row = sequence.row
        expected = self._lengths.expected(row.request.job, row.max_tokens)
        own = sequence.own_length + min(expected, row.tokens_left)
        if not self._make_room(missing, own, nodes, running):
            own = sequence.own_length + 1
            if running:
                return None
            if not self._make_room(missing, own, nodes, running):
                if self._forget_loose(nodes):
                    return self.try_admit(sequence, running)
                return self._admit_alone(sequence)
        self._start_nodes(missing, running)
        if (
            sequence.cached_tokens is None
        ):  # what is missing is computed once, on account of the first to need it
            charged = sum(len(node.tokens) - node.computed for node in missing)
            sequence.cached_tokens = sequence.own_first - charged
            self._stats.prefix_tokens_reused += sequence.cached_tokens
        sequence.computed = sequence.own_first
        sequence.slot = self._new_slot(sequence, own, nodes)
        return missing

    def grow(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Make room for one more token in a sequence's slot; False when there is no memory for it."""
        assert sequence.slot is not None
        if sequence.slot.length < sequence.slot.capacity:
            return True
        if not self._make_tokens(self._memory.growth_tokens(sequence.slot), [], running):
            return False
        sequence.slot = sequence.slot.grown()
        return True

    def reserve(self, sequence: Sequence, end: int) -> bool:
        """Make room for what a sequence computes next, its tokens before position `end`; False when there is
        none.
        """
        return True

    def keep(self, sequence: Sequence) -> None:
        """Leave a finished sequence's own KV to the trie, sampled tokens included: where it lies; or, where
        the slot holds much else, as a copy, if memory is free or idle.
        """
        assert sequence.slot is not None
        if sequence.computed <= sequence.own_first:
            return
        end = self._trie.insert(sequence.root, sequence.tokens[: sequence.computed])
        nodes = [node for node in prefix.path(end, sequence.computed) if node.kv is None]
        nodes = [node for node in nodes if node.end > sequence.own_first]
        self._trie.pin(end)
        if self._keeps_in_place(sequence.slot, sum(len(node.tokens) for node in nodes)):
            for node in nodes:
                node.kv = sequence.slot.run(node.start - sequence.own_start, len(node.tokens))
                node.computed = len(node.tokens)
                self._trie.forget_hosted(node)
        else:
            self._keep_copies(sequence, nodes)
        self._trie.unpin(end)

    def release(self, sequence: Sequence) -> None:
        """Take the slot and the place in the trie back from a sequence."""
        if sequence.slot is not None:
            sequence.slot.release()
            sequence.slot = None
        self._trie.unpin(sequence.node)

    def _keep_copies(self, sequence: Sequence, nodes: list[prefix.Node]) -> None:
        for node in nodes:
            if not self._evict_for(len(node.tokens)):
                break
            node.kv = self._memory.run(node.start, len(node.tokens))
            self._copy_from(sequence, node, node.end)

    def _forget_loose(self, nodes: list[prefix.Node]) -> bool:
        """Give back needed KV in storages that hold more than it; False where there is none such."""
        loose = [node for node in nodes if node.kv is not None and node.kv.loose]
        for node in loose:
            self._trie.forget(node)
        return bool(loose)

    def _admit_alone(self, sequence: Sequence) -> list[prefix.Node] | None:
        """Admit a sequence that does not fit with what it shares, while nothing runs."""
        return None

    def _own_first(self, sequence: Sequence) -> int:
        """Return where the tokens begin that no other known request has, or that must be computed again.

        Without a logit kept after its last token, a prompt that is cached whole computes that token again.
        """
        own = len(sequence.tokens)
        for node in sequence.node.upwards():
            if node.users > 1 or node.kv is not None or node.host is not None:
                break
            own = node.start
        last = sequence.node
        if own < len(sequence.tokens) or not last.complete or last.logits is not None:
            return own
        if len(last.tokens) > 1:
            self._trie.split(last, len(last.tokens) - 1)
        return own - 1

    def _slot_start(self, sequence: Sequence) -> int:
        """Return from where on a sequence has its KV in its slot: also that of short prefixes that few
        share.
        """
        start = sequence.own_first
        for node in sequence.node.upwards():
            if node.end > sequence.own_first:
                continue
            if len(node.tokens) * node.users >= self.worth_a_part:
                break
            start = node.start
        return start

    def _make_room(
        self, missing: list[prefix.Node], own: int, needed: list[prefix.Node], running: list[Sequence]
    ) -> bool:
        """Evict until nodes and a slot fit: first what nobody uses, then what only waiting requests will."""
        slot = self._memory.slot_tokens(own) if own else 0
        return self._make_tokens(self._nodes_tokens(missing) + slot, needed, running)

    def _nodes_tokens(self, nodes: list[prefix.Node]) -> int:
        """Return what nodes of a path take that have nothing yet."""
        return sum(self._memory.run_tokens(node.start, len(node.tokens)) for node in nodes)

    def _make_tokens(self, tokens: int, needed: list[prefix.Node], running: list[Sequence]) -> bool:
        while not self._evict_for(tokens):
            if len(running) > 1:  # they will end, and what waiting requests need is there still
                return False
            used = {node for other in running for node in prefix.path(other.node, other.own_first)}
            if not self._trie.reclaim(used | set(needed)):
                return False
        return True

    def _evict_for(self, tokens: int) -> bool:
        """Evict what nobody uses until so many tokens fit; False when that is not enough."""
        while not self._memory.fits(tokens):
            if not self._trie.evict():
                return False
        return True

    def _new_slot(self, sequence: Sequence, own: int, nodes: list[prefix.Node]) -> Any:
        slot = self._memory.slot(own)
        for node in nodes:
            if node.computed and node.start >= sequence.own_start:
                assert node.kv is not None
                slot.copy(node.start - sequence.own_start, node.kv, node.computed)
        return slot

    def _start_nodes(self, nodes: list[prefix.Node], running: list[Sequence]) -> None:
        """Give nodes of a path memory, and what a running request has computed of these tokens as its own."""
        for node in nodes:
            node.kv = self._memory.run(node.start, len(node.tokens))
            other = who_computed(node, running)
            if other is not None:
                self._copy_from(other, node, until(node))

    def _keeps_in_place(self, slot: Any, tokens: int) -> bool:
        """Tell whether a slot goes to the trie as it is when so many of its tokens do."""
        return bool(tokens >= _LEAST_KEPT * slot.capacity)

    def _copy_from(self, sequence: Sequence, node: prefix.Node, until: int) -> None:
        assert isinstance(sequence.slot, kv.Slot)
        assert isinstance(node.kv, kv.Run)
        tokens = min(sequence.computed, until) - node.start
        first = node.start - sequence.own_start
        node.kv.storage.copy(node.kv.first, sequence.slot.storage, first, tokens)
        node.computed = tokens


def who_computed(node: prefix.Node, running: list[Sequence]) -> Sequence | None:
    """Return a running request that has computed a node's tokens as its own, or some of them."""
    for other in running:
        if other.own_first <= node.start < other.computed and node in other.node.upwards():
            return other
    return None


def until(node: prefix.Node) -> int:
    """Return up to where a node may take computed tokens: somebody may need the logits after its last one,
    and only computing it gives these.
    """
    return node.end - bool(node.ends)
