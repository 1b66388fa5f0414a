"""A request that the pool cannot hold with what it shares, or not at all: it runs alone, on pages of its own.

Its oldest pages go to host memory as it grows. Every step brings them back to a few pages of the pool, layer
by layer and piece by piece, and attends to each piece from all its tokens: these all come later.
"""

from worker.engine import pages

_MOST_PIECE = 16
_LEAST_PIECES = 8


def piece_pages(pool_pages: int) -> int:
    """Return how many pages are brought back at once: few of the pool, but enough to be worth a launch."""
    return max(1, min(_MOST_PIECE, pool_pages // _LEAST_PIECES))


def resident_pages(pool_pages: int) -> int:
    """Return how many pages of a pool hold the newest tokens, beside two pieces of older ones: one is
    attended to while the next one comes.
    """
    return pool_pages - 2 * piece_pages(pool_pages)


def longest(pool_pages: int, host_pages: int) -> int:
    """Return how many pages a request may have. While a page fills, the one before is needed still."""
    resident = resident_pages(pool_pages)
    return max(pool_pages, resident + host_pages if resident > 1 else 0)


class LongSlot(pages.Slot):
    """The pages of one request from position 0 on. The first `moved` are `hosted`, pages of host memory; the
    `table` has 0 there.

    `most` is the most tokens it will have, `window` the most that a layer with a window sees of those.
    """

    def __init__(self, memory: pages.Memory, most: int, window: int) -> None:
        super().__init__(memory, [], 0, [])
        self.memory = memory
        self.window = window
        self.hosted: list[int] = []
        self.staging: list[int] = []
        total = memory.pool.pages - 1
        self.room = total
        host = memory.host.pages if memory.host is not None and memory.streams else 0
        # Not with less host memory than the staging takes of the pool.
        if most > total * memory.page_tokens and longest(total, host) > total:
            self.staging = memory.take(2 * piece_pages(total))
            self.room = resident_pages(total)

    @property
    def moved(self) -> int:
        return len(self.hosted)

    @property
    def most_tokens(self) -> int:
        """How many tokens may be computed at once: what they see in a window stays on the device, too, and
        they may begin inside a page.
        """
        behind = max(0, self.window - 1) if self.staging else 0
        return max(0, (self.room - bool(self.staging)) * self.memory.page_tokens - behind)

    def missing(self, end: int) -> int:
        """Return how many pages more the tokens before position `end` take."""
        return -(-end // self.memory.page_tokens) - len(self.table)

    def move_out(self, count: int) -> None:
        """Give so many of its oldest pages to host memory, which must have room for them. While no more than
        `most_tokens` come at once, these are full, and before every window.
        """
        assert self.memory.host is not None
        oldest = self.table[self.moved : self.moved + count]
        self.hosted += self.memory.host.store_pages(oldest.tolist())
        self.memory.release(oldest.tolist())
        oldest[:] = 0

    def release(self) -> None:
        self.memory.release(self.table[self.moved :].tolist() + self.staging)
        if self.memory.host is not None:
            self.memory.host.release(self.hosted)
