"""Shared prefixes of a job: what its plan could share, by level, and what the engine did share."""

from dataclasses import dataclass
from typing import Any, Self

from jobs import values
from jobs.profile import gather
from jobs.report import draw, words

_MOST_BARS = 6
_LEAST_SHARE = 0.001
"""A level that saves less than this is in the table only."""


@dataclass(frozen=True)
class Sharing:
    """The plan's part of a summary (`jobs/prefixes.py`), and the tokens the engine read and had cached."""

    planned: dict[str, Any]
    requests: int
    read: int
    cached: int

    @classmethod
    def of(cls, summary: dict[str, Any], figures: gather.Figures) -> Self | None:
        """Return None of a job without prompts, or one that an earlier version planned."""
        planned = summary.get("prefixes")
        if not (planned and planned["tokens"]):
            return None
        return cls(planned, figures.computed, figures.computed_prompt_tokens, figures.cached_tokens)

    @property
    def blocks(self) -> list[tuple[int, int, int, int]]:
        """The largest runs: first request, requests, start, tokens."""
        runs = self.planned["largest"]
        return [(run["first"], run["requests"], run["start"], run["tokens"]) for run in runs]

    @property
    def says(self) -> str:
        """What the levels show, in a sentence."""
        shared, whole = self.planned["shared"], self.planned["tokens"]
        return (
            f"The plan could share {shared:,} of {whole:,} prompt tokens ({words.share(shared, whole)}); "
            f"the engine shared {self.cached:,} of {self.read:,} ({words.share(self.cached, self.read)})."
        )

    @property
    def tree_says(self) -> str:
        """What the tree shows, in a sentence."""
        saved = sum((requests - 1) * tokens for _, requests, _, tokens in self.blocks)
        runs = values.counted(sum(level["runs"] for level in self.planned["levels"]), "run")
        part = words.share(saved, self.planned["shared"])
        return f"The largest {len(self.blocks)} of {runs}: {part} of what can be shared."

    def bars(self) -> draw.Bars:
        """Return both sums, and the first levels, as bars of all prompt tokens."""
        whole = self.planned["tokens"]
        labels = [f"The plan, all levels: {words.share(self.planned['shared'], whole)}"]
        labels.append(f"The engine: {words.share(self.cached, self.read)}")
        shares = [self.planned["shared"] / whole, self.cached / self.read if self.read else 0.0]
        drawn = [level for level in self.planned["levels"] if level["saved"] >= _LEAST_SHARE * whole]
        for number, level in enumerate(drawn[:_MOST_BARS], start=1):
            where = (
                f"{values.counted(level['runs'], 'run')} in {values.counted(level['requests'], 'request')}"
            )
            labels.append(f"Level {number}: {words.share(level['saved'], whole)} ({where})")
            shares.append(level["saved"] / whole)
        return draw.Bars(labels, shares, 1.0, frozenset({1}))

    def table(self) -> words.Table:
        """Return the levels in numbers."""
        whole = self.planned["tokens"]
        rows = [
            _row("plan", "", self.planned["requests"], self.planned["shared"], whole),
            _row("engine", "", self.requests, self.cached, self.read),
        ]
        for number, level in enumerate(self.planned["levels"], start=1):
            name = f"level {number}"
            rows.append(_row(name, f"{level['runs']:,}", level["requests"], level["saved"], whole))
        return words.Table(("", "runs", "requests", "tokens saved", "of all"), rows)

    def tree(self) -> draw.Blocks:
        """Return the largest runs where they lie in the plan."""
        requests = self.planned["requests"]
        return draw.Blocks(self.blocks, requests, self.planned["tokens"] / requests)

    def tree_table(self) -> words.Table:
        """Return the largest runs in numbers, those that save most first."""
        ordered = sorted(self.blocks, key=lambda block: -(block[1] - 1) * block[3])
        rows = [
            (f"{first:,}", f"{requests:,}", f"{start:,}", f"{tokens:,}", f"{(requests - 1) * tokens:,}")
            for first, requests, start, tokens in ordered
        ]
        return words.Table(("first request", "requests", "from token", "tokens", "tokens saved"), rows)


def _row(name: str, runs: str, requests: int, saved: int, whole: int) -> tuple[str, ...]:
    return name, runs, f"{requests:,}", f"{saved:,}", words.share(saved, whole)
