"""How a running job is shown: a bar on a terminal, plain lines elsewhere, JSON for programs."""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

import click
from rich import console, progress

from jobs import eta, overall, terminal, values
from jobs.client import Batch, Client
from jobs.standstill import Standstill

MOST_FAULTS = 10
"""Most lines of a refused input that are shown to a person."""
_PACE_SECONDS = 60.0
_LINE_SECONDS = 5.0


class Pace:
    """How fast a job goes, measured over the last minute of what was seen, and how long it still takes."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._looks: list[eta.Look] = []
        self.stands = False
        """Whether it is known that nothing runs: then there is no telling how long."""

    def add(self, at: float, done: int, tokens: int, failed: int = 0) -> None:
        """Note a count of requests, those of them that failed, and of tokens at a time (seconds)."""
        self._seen.append((at, done, tokens))
        while len(self._seen) > 2 and at - self._seen[1][0] > _PACE_SECONDS:
            self._seen.popleft()
        self._looks = eta.noted(self._looks, eta.Look(at, done - failed, failed))

    @property
    def requests_per_second(self) -> float:
        return self._rate(1)

    @property
    def tokens_per_second(self) -> float:
        return self._rate(2)

    def eta_seconds(self, left: int) -> float | None:
        """Return how long `left` requests take, or None while too little is known."""
        if self.stands or not self._looks:
            return None
        _, completed, failed = self._looks[-1]
        return eta.seconds_left(self._looks, completed + failed + left)

    def _rate(self, column: int) -> float:
        if not self._seen:
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds > 0 else 0.0


class View(Protocol):
    """Something that shows a job each time it is looked at."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, batch: Batch, pace: Pace, now: float) -> None: ...
    def note(self, text: str) -> None: ...


class Bar:
    """A progress bar on standard error."""

    def __init__(self) -> None:
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            progress.TimeElapsedColumn(),
            console=console.Console(stderr=True),
        )
        self._task = self._progress.add_task("asking", total=None, facts="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, batch: Batch, pace: Pace, now: float) -> None:
        self._progress.update(
            self._task,
            description=batch.status,
            total=batch.request_counts.total or None,
            completed=batch.done,
            facts=facts(batch, pace),
            refresh=True,
        )

    def note(self, text: str) -> None:
        """Say something once, above the bar."""
        self._progress.console.print(values.printable_lines(text), markup=False, highlight=False)


class Lines:
    """One line on standard error when the state changes, and every few seconds while counts move."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None
        self._at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, batch: Batch, pace: Pace, now: float) -> None:
        seen = (batch.status, batch.done)
        if seen == self._last:
            return
        if self._last and self._last[0] == batch.status and now - self._at < _LINE_SECONDS:
            return
        self._last, self._at = seen, now
        click.echo(f"{batch.status} {facts(batch, pace)}", err=True)

    def note(self, text: str) -> None:
        """Say something once."""
        click.echo(values.printable_lines(text), err=True)


class JsonLines:
    """The batch object on standard output, one line each time it has changed."""

    def __init__(self) -> None:
        self._last: Batch | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, batch: Batch, pace: Pace, now: float) -> None:
        if batch != self._last:
            click.echo(batch.model_dump_json())
        self._last = batch

    def note(self, text: str) -> None:
        """Say something once, to whoever reads standard error."""
        click.echo(values.printable_lines(text), err=True)


def view(as_json: bool) -> View:
    """Choose the view for where the output goes."""
    if as_json:
        return JsonLines()
    return Bar() if terminal.is_lively(sys.stderr) else Lines()


def watch(
    client: Client,
    job_id: str,
    shown: View,
    *,
    poll_seconds: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Batch:
    """Show a job until it has ended; return its last state."""
    pace, standstill = Pace(), Standstill(client)
    with shown:
        while True:
            batch, now = client.batch(job_id), clock()
            # What is refused while planning says nothing of how fast requests run.
            if batch.status != "validating":
                pace.add(now, batch.done, batch.usage.output_tokens, batch.request_counts.failed)
            reason = None if batch.ended else standstill.look(batch, now)
            pace.stands = standstill.stands
            shown.show(batch, pace, now)
            if batch.ended:
                return batch
            if reason:
                shown.note(f"{batch.id} waits: {reason}")
            sleep(poll_seconds)


def facts(batch: Batch, pace: Pace) -> str:
    """Return counts, pace and the time left, as far as they are known."""
    counts = batch.request_counts
    if not counts.total and not batch.ended:
        return "planning: its lines are read and put in order"
    parts = [f"{batch.done:,}/{counts.total:,}"]
    if counts.failed:
        parts.append(f"{counts.failed:,} failed")
    if missing := overall.never_ran(batch):
        parts.append(f"{missing:,} never ran")
    rate = overall.speed(batch, math.inf).tokens_per_second if batch.ended else pace.tokens_per_second
    if rate:
        parts.append(f"{values.rate(rate)} output tokens/s")
    left = pace.eta_seconds(counts.total - batch.done)
    if left is not None and batch.status == "in_progress" and batch.done < counts.total:
        parts.append(f"eta {span(left)}")
    return "  ".join(parts)


def span(seconds: float) -> str:
    """Return a length of time as people say it: `41s`, `3m05s`, `2h10m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
