"""Which waiting requests join the running ones: as many as memory holds at the outputs that are expected."""

from worker.engine import kv, lengths, prefix
from worker.engine.sequence import Sequence
from worker.engine.types import Stats

# Attending to a prefix node costs a fixed time per layer, as much as reading so many tokens in slots.
_WORTH_A_PART = 1024
# A storage stays with the nodes that take it over, if so much of it is theirs.
_LEAST_KEPT = 2 / 3


class Admission:
    """Gives sequences their prefix nodes and slots, and takes these back."""

    def __init__(
        self, memory: kv.Memory, trie: prefix.Trie, expected: lengths.OutputLengths, stats: Stats
    ) -> None:
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
        sequence.own_start = self._start_of_copies(sequence)
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
                return self.try_admit(sequence, running) if self._forget_loose(nodes) else None
        for node in missing:
            node.kv = self._memory.run(len(node.tokens))
            self._copy_from_running(node, running)
        if (
            sequence.cached_tokens is None
        ):  # what is missing is computed once, on account of the first to need it
            charged = sum(len(node.tokens) - node.computed for node in missing)
            sequence.cached_tokens = sequence.own_first - charged
            self._stats.prefix_tokens_reused += sequence.cached_tokens
        sequence.slot = self._memory.slot(own)
        sequence.computed = sequence.own_first
        for node in nodes:
            if node.computed and node.start >= sequence.own_start:
                assert node.kv is not None
                sequence.slot.copy(node.start - sequence.own_start, node.kv, node.computed)
        return missing

    def grow(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Make room for one more token in a sequence's slot; False when there is no memory for it."""
        assert sequence.slot is not None
        if sequence.slot.length < sequence.slot.capacity:
            return True
        wanted = sequence.slot.capacity + 1
        if not self._make_room([], wanted, [], running):
            return False
        sequence.slot = sequence.slot.moved(wanted)
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
        tokens = sum(len(node.tokens) for node in nodes)
        self._trie.pin(end)
        if tokens >= _LEAST_KEPT * sequence.slot.capacity:
            for node in nodes:
                node.kv = sequence.slot.run(node.start - sequence.own_start, len(node.tokens))
                node.computed = len(node.tokens)
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
            node.kv = self._memory.run(len(node.tokens))
            self._copy_from(sequence, node, node.end)

    def _forget_loose(self, nodes: list[prefix.Node]) -> bool:
        """Give back needed KV in storages that hold more than it; False where there is none such."""
        loose = [node for node in nodes if node.kv is not None and node.kv.loose]
        for node in loose:
            self._trie.forget(node)
        return bool(loose)

    def _own_first(self, sequence: Sequence) -> int:
        """Return where the tokens begin that no other known request has, or that must be computed again.

        Without a logit kept after its last token, a prompt that is cached whole computes that token again.
        """
        own = len(sequence.tokens)
        for node in sequence.node.upwards():
            if node.users > 1 or node.kv is not None:
                break
            own = node.start
        last = sequence.node
        if own < len(sequence.tokens) or not last.complete or last.logits is not None:
            return own
        if len(last.tokens) > 1:
            self._trie.split(last, len(last.tokens) - 1)
        return own - 1

    def _start_of_copies(self, sequence: Sequence) -> int:
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
        nodes = sum(len(node.tokens) for node in missing)
        slot = kv.capacity_of(own) if own else 0
        while not self._evict_for(nodes + slot):
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

    def _copy_from_running(self, node: prefix.Node, running: list[Sequence]) -> None:
        """Fill a new node from a running request that has computed these tokens as its own."""
        for other in running:
            if other.own_first <= node.start < other.computed and node in other.node.upwards():
                # Somebody may need the logits after its last token: only computing it gives these.
                self._copy_from(other, node, node.end - bool(node.ends))
                return

    def _copy_from(self, sequence: Sequence, node: prefix.Node, until: int) -> None:
        assert sequence.slot is not None
        assert node.kv is not None
        tokens = min(sequence.computed, until) - node.start
        first = node.start - sequence.own_start
        node.kv.storage.copy(node.kv.first, sequence.slot.storage, first, tokens)
        node.computed = tokens
