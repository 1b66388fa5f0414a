"""How a running job is shown."""

from typing import Any

import orjson
import pytest

from jobs import client, progress
from tests.unit.test_client import batch


def seen(**changes: object) -> client.Batch:
    return client.Batch.model_validate(batch(**changes))


def counts(completed: int, failed: int = 0, total: int = 10) -> dict[str, int]:
    return {"total": total, "completed": completed, "failed": failed}


def test_pace_is_that_of_the_last_minute_not_of_the_whole_job() -> None:
    pace = progress.Pace()
    for second in range(0, 600, 10):
        pace.add(second, second // 10, 0)
    for second in range(600, 700, 10):
        pace.add(second, second - 540, 0)
    assert pace.requests_per_second == pytest.approx(1.0)
    assert pace.eta_seconds(30) == pytest.approx(30)


def test_nothing_is_promised_before_something_moved() -> None:
    pace = progress.Pace()
    assert pace.eta_seconds(5) is None
    pace.add(1.0, 0, 0)
    pace.add(2.0, 0, 0)
    assert pace.eta_seconds(5) is None


def test_facts_tell_counts_pace_and_time_left() -> None:
    pace = progress.Pace()
    for second in range(0, 60, 10):
        pace.add(second, second * 20 + 1, second * 1234, failed=1)
    job = seen(request_counts=counts(1000, 1, 2001))
    assert progress.facts(job, pace) == "1,001/2,001  1 failed  1,234 output tokens/s  eta 50s"


def test_requests_that_fail_at_once_make_nothing_faster() -> None:
    pace = progress.Pace()
    for second in range(0, 60, 10):
        pace.add(second, second + second * 50, 0, failed=second * 50)
    assert pace.eta_seconds(100) == pytest.approx(100)


def test_a_job_without_counts_says_what_happens() -> None:
    assert progress.facts(seen(status="validating"), progress.Pace()).startswith("planning")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m"), (3600, "1h00m")]
)
def test_span_reads_as_people_say_it(seconds: float, text: str) -> None:
    assert progress.span(seconds) == text


class Script:
    """A client that reports one batch after the other."""

    def __init__(self, *batches: client.Batch) -> None:
        self.batches = iter(batches)

    def batch(self, job_id: str) -> client.Batch:
        return next(self.batches)

    def queue(self) -> dict[str, Any]:
        return {"workers": 0}


def run(view: progress.View, *batches: client.Batch) -> client.Batch:
    clock = iter(range(1000))
    return progress.watch(
        Script(*batches), "batch_1", view, clock=lambda: float(next(clock)), sleep=lambda _: None
    )


def test_watch_ends_with_the_job() -> None:
    last = run(progress.Lines(), seen(), seen(status="finalizing"), seen(status="completed"), seen())
    assert last.status == "completed"


def test_lines_are_few_while_counts_move(capsys: pytest.CaptureFixture[str]) -> None:
    moving = [seen(request_counts=counts(done, total=20)) for done in range(20)]
    run(progress.Lines(), *moving, seen(status="completed"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["0/20", "5/20", "10/20", "15/20", "0/0"]


def test_requests_refused_while_planning_promise_no_end(capsys: pytest.CaptureFixture[str]) -> None:
    run(
        progress.Lines(),
        seen(status="validating"),
        seen(request_counts=counts(0, 1)),
        seen(status="completed", request_counts=counts(9, 1)),
    )
    assert "eta" not in capsys.readouterr().err


def test_json_lines_come_only_when_something_changed(capsys: pytest.CaptureFixture[str]) -> None:
    run(progress.JsonLines(), seen(), seen(), seen(status="completed"))
    lines = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["status"] for line in lines] == ["in_progress", "completed"]


@pytest.mark.parametrize("view", [progress.Lines, progress.JsonLines, progress.Bar])
def test_why_a_job_waits_is_said_once_and_not_among_the_results(
    view: type[progress.Lines], capsys: pytest.CaptureFixture[str]
) -> None:
    run(view(), *[seen(status="validating")] * 40, seen(status="completed"))
    shown = capsys.readouterr()
    assert shown.err.count("waits: no worker is there") == 1
    assert "no worker" not in shown.out


def test_bar_shows_state_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    run(progress.Bar(), seen(request_counts=counts(4)), seen(status="completed", request_counts=counts(10)))
    shown = capsys.readouterr().err
    assert "completed" in shown
    assert "10/10" in shown


@pytest.mark.parametrize(
    ("environment", "terminal", "kind"),
    [
        ({}, True, progress.Bar),
        ({}, False, progress.Lines),
        ({"NO_COLOR": "1"}, True, progress.Lines),
        ({"NO_COLOR": ""}, True, progress.Bar),
        ({"TERM": "dumb"}, True, progress.Lines),
    ],
)
def test_view_fits_where_the_output_goes(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], terminal: bool, kind: type
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    assert isinstance(progress.view(False), kind)
    assert isinstance(progress.view(True), progress.JsonLines)


def test_the_last_line_tells_the_pace_of_the_summary_not_of_the_last_minute() -> None:
    pace = progress.Pace()
    for second in range(5):
        pace.add(second, second, second * 90)
    usage = {"output_tokens": 360}
    facts = {"status": "completed", "request_counts": counts(10), "usage": usage, "in_progress_at": 100}
    new = seen(**facts, running_seconds=20.0, tokens_per_second=4.66, completed_at=190)
    assert progress.facts(new, pace) == "10/10  4.7 output tokens/s"
    of_older_server = seen(**facts, completed_at=190)
    assert progress.facts(of_older_server, pace) == "10/10  4.0 output tokens/s"


def test_what_never_ran_is_told_at_the_end_alone() -> None:
    pace = progress.Pace()
    assert progress.facts(seen(status="cancelled", request_counts=counts(1)), pace) == "1/10  9 never ran"
    assert "never" not in progress.facts(seen(status="cancelling", request_counts=counts(1)), pace)


class Recorder:
    """A view that keeps what it was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.notes: list[int] = []

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, job: client.Batch, pace: progress.Pace, now: float) -> None:
        self.shown.append(progress.facts(job, pace))

    def note(self, text: str) -> None:
        self.notes.append(len(self.shown))


def test_no_time_left_is_told_once_it_is_known_that_nothing_runs() -> None:
    moving = [seen(request_counts=counts(done, total=100)) for done in range(30)]
    view = Recorder()
    run(view, *moving, *[moving[-1]] * 20, seen(status="cancelled"))
    (told_at,) = view.notes
    assert all("eta" in line for line in view.shown[29 : told_at - 1])
    assert not any("eta" in line for line in view.shown[told_at - 1 :])
