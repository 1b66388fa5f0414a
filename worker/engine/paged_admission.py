"""Admission over pages: what is in host memory comes back, and who fits in no other way runs alone."""

from itertools import pairwise
from typing import Any

import numpy as np

from worker.engine import admission, long_slot, pages, prefix
from worker.engine.long_slot import LongSlot
from worker.engine.sequence import Sequence


class PagedAdmission(admission.Admission):
    """Admission over pages: slots begin with the page that their own tokens begin in; only what lies before
    these in it is copied.
    """

    _memory: pages.Memory

    def try_admit(self, sequence: Sequence, running: list[Sequence]) -> list[prefix.Node] | None:
        if any(isinstance(other.slot, LongSlot) for other in running):
            return None
        return super().try_admit(sequence, running)

    def grow(self, sequence: Sequence, running: list[Sequence]) -> bool:
        if isinstance(sequence.slot, LongSlot):
            return self.reserve(sequence, sequence.computed + 1)
        return super().grow(sequence, running)

    def reserve(self, sequence: Sequence, end: int) -> bool:
        """See Admission. Who runs alone has its oldest pages go to host memory."""
        slot = sequence.slot
        if not isinstance(slot, LongSlot):
            return True
        missing = slot.missing(end)
        while missing > self._memory.free_pages and (self._trie.evict() or self._trie.reclaim(set())):
            pass
        moving = missing - self._memory.free_pages
        if moving > 0:
            if not slot.staging or not self._trie.make_room(moving):
                return False
            slot.move_out(moving)
        if missing > 0:
            slot.table = np.append(slot.table, np.array(self._memory.take(missing), dtype=np.int32))
        return True

    def keep(self, sequence: Sequence) -> None:
        if not isinstance(sequence.slot, LongSlot):
            super().keep(sequence)

    def _admit_alone(self, sequence: Sequence) -> list[prefix.Node] | None:
        """Give a sequence pages that it shares with nobody, some of them maybe in host memory."""
        memory, host = self._memory, self._memory.host
        most = sequence.prompt_length + sequence.row.max_tokens
        windows = [window for window in (host.windows if host is not None else []) if window < most]
        fits = memory.pool.pages - 1
        if host is not None and host.streams:
            fits = long_slot.longest(fits, host.pages)
        if len(sequence.tokens) + 1 > fits * memory.page_tokens:
            return None
        while self._trie.evict() or self._trie.reclaim(set()):
            pass
        slot = LongSlot(memory, most, max(windows, default=0))
        if not slot.most_tokens:
            slot.release()
            return None
        self._part_from_others(sequence)
        sequence.own_start = sequence.own_first = sequence.computed = 0
        sequence.cached_tokens = sequence.cached_tokens or 0
        sequence.slot = slot
        return []

    def _part_from_others(self, sequence: Sequence) -> None:
        shared, sequence.root = sequence.node, f"{sequence.root}\0{sequence.row.id}"
        sequence.node = self._trie.insert(sequence.root, sequence.tokens)
        self._trie.pin(sequence.node)
        self._trie.unpin(shared)

    def _slot_start(self, sequence: Sequence) -> int:
        return self._memory.slot_start(sequence.own_first)

    def _new_slot(self, sequence: Sequence, own: int, nodes: list[prefix.Node]) -> Any:
        runs = [node.kv for node in nodes if isinstance(node.kv, pages.Run)]
        return self._memory.slot(sequence.own_start, own, runs)

    def _forget_loose(self, nodes: list[prefix.Node]) -> bool:
        """Give back needed KV: what is on pages of its own fits on fewer, one node after the other."""
        held = [node for node in nodes if node.kv is not None]
        for node in held:
            self._trie.move_out(node)
        return bool(held)

    def _nodes_tokens(self, nodes: list[prefix.Node]) -> int:
        size = self._memory.page_tokens
        inside = [b for a, b in pairwise(nodes) if b.parent is a and b.start % size]
        return super()._nodes_tokens(nodes) - len(inside) * size

    def _start_nodes(self, nodes: list[prefix.Node], running: list[Sequence]) -> None:
        last: tuple[prefix.Node, pages.Run] | None = None
        for node in nodes:
            other = admission.who_computed(node, running)
            if other is None:
                # Nobody else goes on where the last one ends: it was started just now.
                before = last[1] if last is not None and last[0] is node.parent else None
                run = node.kv = self._memory.run(node.start, len(node.tokens), before)
                self._restore(node, run)
                last = node, run
                continue
            assert isinstance(other.slot, pages.Slot)
            # Both may compute and write the rest of its tokens: the same numbers.
            node.kv = other.slot.run(node.start - other.own_start, len(node.tokens))
            node.computed = min(other.computed, admission.until(node)) - node.start
            self._trie.forget_hosted(node)
            last = None

    def _restore(self, node: prefix.Node, run: pages.Run) -> None:
        """Copy back what host memory has of a node."""
        if node.host is None or self._memory.host is None:
            return
        until = node.end if node.logits is not None else admission.until(node)
        node.computed = min(node.host.tokens, until - node.start)
        self._memory.host.restore(node.host, run, node.computed)
        self._stats.prefix_tokens_restored += node.computed
        self._trie.forget_hosted(node)

    def _keeps_in_place(self, slot: Any, tokens: int) -> bool:
        return True
