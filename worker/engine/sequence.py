"""A request in the fast engine: its place in the trie, its own KV, and how far it is."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.engine import kv, pages, prefix
from worker.engine.rows import RowState
from worker.engine.types import Row


@dataclass(eq=False)
class Sequence:
    """Waits or runs. `tokens` are prompt and sampled tokens; `computed` of them have KV.

    Tokens before `own_start` have their KV in prefix nodes, the others in `slot`. Those before `own_first`
    are computed in prefix nodes too, and copied.
    """

    row: Row
    state: RowState
    root: str
    node: prefix.Node
    """Where its prompt (and what it had sampled when it was preempted) ends in the trie."""
    rank: int
    """The lowest run first."""
    tokens: list[int] = field(default_factory=list)
    arrived: float = 0.0
    own_start: int = 0
    own_first: int = 0
    computed: int = 0
    slot: kv.Slot | pages.Slot | None = None
    cached_tokens: int | None = None
    recomputes_until: int = 0
    """How many of its tokens were computed before it was preempted."""
    unread: int = 0
    """How many tokens at the end of `tokens` the host has not read from the device."""
    doubted: bool = False
    """Whether a token of it could not be chosen on the device: the host chooses from then on."""

    def order(self) -> tuple[bool, int, str, bytes]:
        """Return what waiting sequences are sorted by; neighbours by prefix stay together among equals."""
        tokens = array("I", self.tokens)
        tokens.byteswap()  # bytes compare faster than lists, and as these do when the largest byte is first
        return not self.preempted, self.rank, self.root, tokens.tobytes()

    @property
    def preempted(self) -> bool:
        """Whether it was admitted before (while it waits)."""
        return self.row.admitted > 0

    @property
    def scored(self) -> bool:
        """Whether the log probabilities of its prompt are wanted: then all of it is computed for it alone."""
        return self.row.request.sampling.prompt_logprobs

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def ends_unread(self) -> bool:
        """Whether what it has unread fills its output."""
        return 0 < self.unread >= self.row.tokens_left

    @property
    def own_tokens(self) -> int:
        """How many tokens no prefix node computes."""
        return len(self.tokens) - self.own_first

    @property
    def own_length(self) -> int:
        return len(self.tokens) - self.own_start

    def recomputed(self, first: int, tokens: int) -> int:
        """Return how many of so many tokens from position `first` on were computed before a preemption."""
        return max(0, min(tokens, self.recomputes_until - first))

    def prefilled(self, first: int, tokens: int) -> int:
        """Return how many of so many tokens from position `first` on are of the prompt, for the first
        time.
        """
        return max(0, min(first + tokens, self.prompt_length) - max(first, self.recomputes_until))

    @property
    def prompt_length(self) -> int:
        return len(self.row.request.prompt_ids)

    @property
    def parent(self) -> prefix.Node | None:
        """The node after which its own tokens begin."""
        return next((node for node in self.node.upwards() if node.end <= self.own_first), None)

    def prefix_nodes(self) -> list[prefix.Node]:
        """Return the nodes that hold its KV before `own_start`, from the front."""
        return prefix.path(self.node, self.own_start)

    def copies(self, node: prefix.Node) -> bool:
        """Tell whether it has the KV of a node in its slot as well."""
        return self.own_start <= node.start and node.end <= self.own_first and node in self.node.upwards()

    def prefix_complete(self) -> bool:
        return all(node.complete for node in self.node.upwards() if node.end <= self.own_first)


def distinct_tokens(sequences: Iterable[Sequence]) -> int:
    """Return how many tokens sequences have by now, those that they share counted once."""
    nodes: set[prefix.Node] = set()
    sampled = 0
    for sequence in sequences:
        nodes.update(sequence.node.upwards())
        sampled += len(sequence.tokens) - sequence.node.end
    return sampled + sum(len(node.tokens) for node in nodes)
