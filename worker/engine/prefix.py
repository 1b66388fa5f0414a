"""The token trie: which runs of tokens requests have in common, and whose KV is kept.

A compressed (radix) trie as in SGLang's RadixAttention (Zheng et al. 2024). All known requests are in it
before they run, so a shared run of tokens is a node of its own before its first token is computed.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from torch import Tensor

from worker.engine import kv, pages

if TYPE_CHECKING:
    from worker.engine import host_tier


class Node:
    """A run of tokens after those of its parents.

    `users` counts the requests, waiting or running, whose tokens pass through; `ends` those whose prompt ends
    exactly here. `kv` holds keys and values of the first `computed` tokens. Without it the run
    has one user, which keeps its KV itself, or nobody runs yet.
    """

    __slots__ = (
        "children",
        "computed",
        "ends",
        "host",
        "kv",
        "logits",
        "parent",
        "start",
        "tokens",
        "used_at",
        "users",
    )

    def __init__(self, tokens: list[int], start: int, parent: "Node | None") -> None:
        self.tokens = tokens
        self.start = start
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.users = 0
        self.ends = 0
        self.kv: kv.Run | pages.Run | None = None
        self.host: pages.Run | None = None
        self.computed = 0
        self.logits: Tensor | None = None
        """Logits [V] after its last token, kept while a prompt that is known ends here."""
        self.used_at = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def complete(self) -> bool:
        return self.computed == len(self.tokens)

    def upwards(self) -> Iterator["Node"]:
        """Yield this node and its ancestors, without the empty root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class Trie:
    """The nodes of all roots. A root separates what must not be shared, such as tenants.

    Nodes that nobody uses stay, least recently used first to go, until `evict` or `expire` takes them. With
    `host`, KV that loses its place goes there; what nobody uses makes room for it, what somebody waits for
    does not. `in_step` is what the step that is being made computes: (node, first position), not there yet.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, host: "host_tier.HostTier | None" = None
    ) -> None:
        self._clock = clock
        self._host = host
        self._roots: dict[str, Node] = {}
        self._idle: OrderedDict[Node, None] = OrderedDict()
        self._hosted: OrderedDict[Node, None] = OrderedDict()
        """Nodes that nobody uses, as `_idle`, with their KV in host memory."""
        self.in_step: list[tuple[Node, int]] = []

    def insert(self, root: str, tokens: list[int]) -> Node:
        """Return the node that ends exactly after `tokens`; split and add nodes as needed."""
        node, at = self._roots.setdefault(root, Node([], 0, None)), 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = Node(tokens[at:], at, node)
                node.children[tokens[at]] = child
                return child
            same = common_length(child.tokens, tokens, at)
            node = child if same == len(child.tokens) else self.split(child, same)
            at += same
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut a node before its token `at`; return the new upper part. The node itself becomes the
        lower one.
        """
        assert node.parent is not None
        upper = Node(node.tokens[:at], node.start, node.parent)
        upper.users, upper.used_at = node.users, node.used_at
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.start, node.parent = node.tokens[at:], node.start + at, upper
        upper.children[node.tokens[0]] = node
        if node.kv is not None:
            upper.kv, node.kv = node.kv.split(at)
            upper.computed, node.computed = min(at, node.computed), max(0, node.computed - at)
            if not upper.users:
                self._idle[upper] = None
        if node.host is not None:
            self._split_hosted(upper, node, at)
            if not (node.users or node.children or node.kv or node.host):
                self._remove(node)
        return upper

    def pin(self, node: Node) -> None:
        """Count one more request that ends at a node and uses its ancestors."""
        node.ends += 1
        while node.parent is not None:
            if not node.users:
                self._idle.pop(node, None)
                self._hosted.pop(node, None)
            node.users += 1
            node = node.parent

    def unpin(self, node: Node) -> None:
        """Count one request less; nodes without users stay when they have KV, as the most recently
        used ones.
        """
        now = self._clock()
        node.ends -= 1
        if not node.ends:
            node.logits = None
        for each in list(node.upwards()):
            each.users -= 1
            if each.users:
                continue
            each.used_at = now
            if each.host is not None:
                self._hosted[each] = None
                continue
            if each.kv is not None and each.complete:
                self._idle[each] = None
                continue
            _free(each)
            if not each.children:
                self._remove(each)

    def evict(self) -> bool:
        """Take the KV of the least recently used node that nobody uses and on which no KV hangs; False when
        there is none.
        """
        node = next((node for node in self._idle if not _has_kv_below(node)), None)
        if node is None:
            return False
        self.move_out(node)
        self._remove_empty(node)
        return True

    def reclaim(self, used: set[Node]) -> bool:
        """Free the KV of one node that none of `used` is and only waiting requests will need; they compute it
        again, or take it from host memory.
        """
        node = next((node for node in self._all() if node.kv is not None and node not in used), None)
        if node is None:
            return False
        self.move_out(node)
        return True

    def forget(self, node: Node) -> None:
        """Give the KV of a node back; who needs it computes it again."""
        _free(node)
        self._idle.pop(node, None)

    def forget_hosted(self, node: Node) -> None:
        """Give back what host memory has of a node, if anything."""
        if node.host is not None:
            node.host.release()
            node.host = None
            self._hosted.pop(node, None)

    def clear(self) -> None:
        """Drop all that nobody uses, from host memory too."""
        while self._evict_hosted():
            pass
        host, self._host = self._host, None
        while self.evict():
            pass
        self._host = host

    def expire(self, older_than: float) -> None:
        """Drop what nobody has used since a moment of the clock."""
        # Children became idle before their parents, and went to host memory before. The upper part of a node
        # that was split comes after all that was idle by then, and may stay for as much longer.
        for held in (self._hosted, self._idle):
            for node in list(takewhile(lambda node: node.used_at < older_than, held)):
                if node in held and not node.children:
                    self._remove(node)

    def move_out(self, node: Node) -> None:
        """Free the KV of a node, which host memory takes if it has room."""
        logits, tokens = node.logits, self._written(node)
        host = self._host
        if host is not None and tokens and self._make_room(host, host.pages_for(node.start, tokens)):
            assert isinstance(node.kv, pages.Run)
            node.host = host.store(node.kv, tokens)
            if not node.users:
                self._hosted[node] = None
        self.forget(node)
        if node.host is not None:  # with these, a prompt that ends here needs no token again
            node.logits = logits

    def _written(self, node: Node) -> int:
        """Return how many tokens of a node have KV that a step which was launched computes."""
        firsts = [first for target, first in self.in_step if node in target.upwards()]
        return max(0, min([node.computed, *(first - node.start for first in firsts)]))

    def make_room(self, count: int) -> bool:
        """Drop from host memory until so many pages are free there, also what somebody waits for; False when
        that is not enough.
        """
        if self._host is None or count > self._host.pages:
            return False
        if self._make_room(self._host, count):
            return True
        for node in self._all():
            if count <= self._host.free_pages:
                break
            self.forget_hosted(node)
        return count <= self._host.free_pages

    def _all(self) -> Iterator[Node]:
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children.values())

    def _make_room(self, host: "host_tier.HostTier", count: int) -> bool:
        if count > host.pages:
            return False
        while count > host.free_pages:
            if not self._evict_hosted():
                return False
            host.evictions += 1
        return True

    def _evict_hosted(self) -> bool:
        """Drop from host memory the node that nobody has used for longest; False when all are waited for."""
        leaves = (node for node in self._hosted if not node.children)
        node = next(leaves, next(iter(self._hosted), None))
        if node is None:
            return False
        self.forget_hosted(node)
        self._remove_empty(node)
        return True

    def _split_hosted(self, upper: Node, lower: Node, at: int) -> None:
        kept = lower.host
        assert kept is not None
        upper.host, lower.host = kept.split(at) if at < kept.tokens else (kept, None)
        if not upper.users:
            self._hosted[upper] = None
        if lower.host is None:
            self._hosted.pop(lower, None)

    def _remove_empty(self, node: Node) -> None:
        if not (node.children or node.host):
            self._remove(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens[0]]
        self.forget(node)
        self.forget_hosted(node)
        if parent.parent is not None and not (parent.users or parent.children or parent.kv or parent.host):
            self._remove(parent)


def _has_kv_below(node: Node) -> bool:
    return any(child.kv is not None for child in node.children.values())


def _free(node: Node) -> None:
    if node.kv is not None:
        node.kv.release()
    node.kv, node.computed, node.logits = None, 0, None


def common_length(a: Sequence[int], b: Sequence[int], at: int = 0) -> int:
    """Return how many tokens `a` and `b[at:]` have in common in front, by bisection over slices."""
    if a == b[at : at + len(a)]:
        return len(a)
    low, high = 0, min(len(a), len(b) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def path(node: Node, until: int) -> list[Node]:
    """Return the nodes from the root down to `node` that end at or before position `until`."""
    return [each for each in node.upwards() if each.end <= until][::-1]
