"""What a run says of itself: one live line on a terminal, plain lines elsewhere."""

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

import click
from rich import console, live, text

from jobs import progress, terminal
from jobs.dataset import work

_LINE_SECONDS = 10.0
_ESTIMATE_REQUESTS = 300
"""So many answers tell how long the rest will take."""
_STEP = math.log(1.02)
"""Quantiles are told to 2 %."""


class Quantiles:
    """Quantiles of many times (seconds) in little memory: counts of classes that are 2 % wide."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0

    def add(self, seconds: float) -> None:
        self._counts[round(math.log(max(seconds, 1e-6)) / _STEP)] += 1
        self._total += 1

    def at(self, share: float) -> float | None:
        """Return the time that a share of all does not exceed; None if there are none."""
        seen = 0
        for bin in sorted(self._counts):
            seen += self._counts[bin]
            if seen >= share * self._total:
                return math.exp(bin * _STEP)
        return None


@dataclass
class Counts:
    """What became of the rows and requests so far."""

    rows: int = 0
    unfit: int = 0
    shared: int = 0
    resumed: int = 0
    cached: int = 0
    invalid: int = 0
    done: work.Progress = field(default_factory=work.Progress)
    seconds: float = 0.0
    """In which jobs ran."""
    seconds_before: float = 0.0
    """In which jobs of earlier runs ran."""


class View(Protocol):
    """Something that shows a line again and again."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, line: str) -> None: ...
    def say(self, line: str) -> None: ...


class Report:
    """Counts a generation, and tells a view of it. `expected` are its requests, with those served already."""

    def __init__(
        self, view: View, title: str, expected: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts, self.expected, self.title = Counts(), expected, title
        self.latencies = Quantiles()
        self._view, self._clock = view, clock
        self._pace = progress.Pace()
        self._estimated = False
        self._announced = 0
        self._foreseen = expected

    def announce(self, requests: int) -> None:
        """Expect so many requests, which may be some of those that were expected from the first."""
        foreseen = min(requests, self._foreseen)
        self._foreseen -= foreseen
        self.expected += requests - foreseen
        self._announced = requests

    def spent(self, seconds: float) -> None:
        """Say how long jobs ran before this run."""
        self.counts.seconds_before = seconds - self.counts.seconds

    def read_all(self, requests: int) -> None:
        """Say how many there really were: of what was announced some may not have been readable."""
        self.expected += requests - self._announced

    def asked(self, rows: int, unfit: int, samples: int) -> None:
        """Count rows that were looked at, and those of them that have no prompt."""
        self.counts.rows += rows
        self.counts.unfit += unfit
        self.expected -= unfit * samples

    def shared(self, requests: int) -> None:
        """Count requests that another one's output serves."""
        self.counts.shared += requests

    def resumed(self, requests: int) -> None:
        self.counts.resumed += requests

    def cached(self, requests: int) -> None:
        self.counts.cached += requests

    def invalid(self, requests: int) -> None:
        self.counts.invalid += requests

    @contextmanager
    def job(self) -> Iterator[work.Listener]:
        """Give a listener to whoever runs a job."""
        before, began = self.counts.done, self._clock()

        def hear(now: work.Progress) -> None:
            self.counts.done = before + now
            self._show()

        try:
            yield hear
        finally:
            self.counts.seconds += self._clock() - began

    def _show(self) -> None:
        done = self.counts.done
        self._pace.add(self._clock(), done.done, done.completion_tokens, done.failed)
        self._view.show(self.line())
        left = self.left()
        if self._estimated or done.done < _ESTIMATE_REQUESTS or not left:
            return
        if (seconds := self._pace.eta_seconds(left)) is not None:
            self._estimated = True
            told = progress.span(seconds)
            self._view.say(f"At the pace of the first {done.done}, the other {left:,} take {told}.")

    def left(self) -> int:
        """Return how many requests are left."""
        return max(0, self.expected - self._served - self.counts.done.done)

    @property
    def _served(self) -> int:
        """How many requests have an output without being computed in this run."""
        return self.counts.resumed + self.counts.cached + self.counts.shared

    def line(self) -> str:
        """Return how far the generation is, in one line."""
        counts, done = self.counts, self.counts.done
        parts = [f"{self.title}  {self._served + done.done:,}/{self.expected:,}"]
        if rate := self._pace.requests_per_second:
            parts.append(f"{rate:,.1f}/s")
        if rate := self._pace.tokens_per_second:
            parts.append(f"{rate:,.0f} output tokens/s")
        if done.prompt_tokens:
            parts.append(f"prefix hits {done.cached_tokens / done.prompt_tokens:.0%}")
        failed = done.failed + counts.unfit
        parts += [f"{failed:,} failed"] * bool(failed) + [f"{counts.invalid:,} invalid"] * bool(
            counts.invalid
        )
        left = self.left()
        if left and (seconds := self._pace.eta_seconds(left)) is not None:
            parts.append(f"{progress.span(seconds)} left")
        return "  ".join(parts)


class LiveLine:
    """One line on a terminal's standard error that changes in place."""

    def __init__(self) -> None:
        self._console = console.Console(stderr=True)
        self._live = live.Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, line: str) -> None:
        self._live.update(text.Text(line, overflow="ellipsis", no_wrap=True), refresh=True)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)


class PlainLines:
    """A line on standard error every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at, self._last = clock, -math.inf, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, line: str) -> None:
        now = self._clock()
        if line != self._last and now - self._at >= _LINE_SECONDS:
            self._at, self._last = now, line
            click.echo(line, err=True)

    def say(self, line: str) -> None:
        click.echo(line, err=True)


class Silent:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...
    def show(self, line: str) -> None: ...
    def say(self, line: str) -> None: ...


def view() -> View:
    """Choose the view for where standard error goes."""
    return LiveLine() if terminal.is_lively(sys.stderr) else PlainLines()
