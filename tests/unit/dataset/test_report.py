"""What a run says of itself, on a clock of the test's own."""

import io
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dataset import report, work


class Shown:
    """Keeps what it is shown and told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.said: list[str] = []

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, line: str) -> None:
        self.lines.append(line)

    def say(self, line: str) -> None:
        self.said.append(line)


class Clock:
    """Time that passes when the test says so (seconds)."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(expected: int = 1000) -> tuple[report.Report, Shown, Clock]:
    shown, clock = Shown(), Clock()
    return report.Report(shown, "generate", expected, clock), shown, clock


@given(st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_within_two_percent(times: list[float], share: float) -> None:
    quantiles = report.Quantiles()
    for seconds in times:
        quantiles.add(seconds)
    exact = sorted(times)[math.ceil(share * len(times)) - 1]
    assert quantiles.at(share) == pytest.approx(exact, rel=0.02)


def test_there_are_no_quantiles_of_nothing_and_zero_is_a_time() -> None:
    quantiles = report.Quantiles()
    assert quantiles.at(0.5) is None
    quantiles.add(0.0)
    assert quantiles.at(0.5) == pytest.approx(0, abs=1e-5)


def test_the_live_line_tells_count_rate_tokens_hits_failures_and_time_left() -> None:
    told, shown, clock = made()
    told.asked(1000, 10, 1)
    told.resumed(90)
    told.invalid(2)
    with told.job() as hear:
        hear(work.Progress())
        for part in (1, 2):
            clock.now += 5
            hear(work.Progress(100 * part, 0, 2000 * part, 500 * part, 2500 * part))
    assert shown.lines[0].startswith("generate  90/990")
    assert shown.lines[2] == (
        "generate  290/990  20.0/s  500 output tokens/s  prefix hits 25%  10 failed  2 invalid  35s left"
    )


def test_what_is_served_already_is_not_left() -> None:
    told, _, _ = made(100)
    told.asked(25, 1, 4)
    told.resumed(10)
    told.cached(20)
    told.shared(30)
    assert told.expected == 96
    assert told.left() == 36
    assert told.line() == "generate  60/96  1 failed"


def test_further_attempts_never_leave_less_than_nothing() -> None:
    told, _, _ = made(2)
    with told.job() as hear:
        hear(work.Progress(5))
    assert told.left() == 0
    assert "left" not in told.line()


def test_jobs_add_up_and_so_does_the_time_in_them() -> None:
    told, _, clock = made()
    for _ in range(2):
        with told.job() as hear:
            hear(work.Progress(1, 0, 10))
            clock.now += 3
            hear(work.Progress(5, 1, 50, 10, 20))
        clock.now += 100
    assert told.counts.done == work.Progress(10, 2, 100, 20, 40)
    assert told.counts.seconds == 6


def test_the_time_in_a_job_that_was_broken_off_counts() -> None:
    told, _, clock = made()

    def broken_off() -> None:
        with told.job():
            clock.now += 5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert told.counts.seconds == 5


def test_once_a_few_hundred_are_done_the_rest_is_estimated_once() -> None:
    told, shown, clock = made(3000)
    with told.job() as hear:
        for done in range(0, 1000, 100):
            hear(work.Progress(done))
            clock.now += 10
    assert shown.said == ["At the pace of the first 300, the other 2,700 take 4m30s."]


def test_lines_that_are_not_for_a_terminal_come_every_ten_seconds_and_only_news(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    view = report.PlainLines(clock)
    with view:
        for line, passed in (("a", 0), ("b", 5), ("c", 5), ("c", 20), ("d", 1)):
            clock.now += passed
            view.show(line)
        view.say("said")
    caught = capsys.readouterr()
    assert caught.err.split() == ["a", "c", "d", "said"]
    assert caught.out == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "kind"),
    [
        ({"TERM": "xterm"}, report.LiveLine),
        ({"TERM": "dumb"}, report.PlainLines),
        ({"TERM": "xterm", "NO_COLOR": "1"}, report.PlainLines),
    ],
)
def test_only_a_terminal_that_can_gets_a_live_line(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], kind: type
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert isinstance(report.view(), report.PlainLines)
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert isinstance(report.view(), kind)


def test_a_live_line_shows_what_looks_like_markup_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with report.LiveLine() as view:
        view.show("[bold]x[/] {y}")
        view.say("[red]z[/]")
    assert "[red]z[/]" in capsys.readouterr().err


def test_silence_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with report.Silent() as view:
        view.show("a")
        view.say("b")
    caught: Any = capsys.readouterr()
    assert (caught.out, caught.err) == ("", "")
