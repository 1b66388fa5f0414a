"""What `longhaul top` draws in a terminal of some size, and how its lists are moved."""

from dataclasses import replace
from typing import Any

import pytest
from rich import console

from jobs import top_data, top_terminal, top_view
from jobs.top_view import View

SIZE = (130, 24)


def row(number: int = 0, **changes: Any) -> top_data.Row:
    made = top_data.Row(f"batch_{number:026}", "in_progress", "smol", 1234, 50_000, 7, 12.34, 2345.6, 3700.0)
    return replace(made, **changes)


def worker(number: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "id": f"host-{number}",
        "model": "smol",
        "state": "serving",
        "running": 5,
        "capacity": 64,
        "prompt_tokens_per_second": 1000.0,
        "output_tokens_per_second": 55.5,
        "prefix_hit_ratio": 0.4,
        "kv_usage_ratio": None,
    } | changes


def snapshot(jobs: int = 2, models: int = 1, workers: int = 1, more: bool = False) -> top_data.Snapshot:
    queue = [
        {"model": f"m{number}", "queued": 1100, "leased": 64, "buckets": {"128": 1000, "512": 100}}
        for number in range(models)
    ]
    rows = [row(number) for number in range(jobs)]
    return top_data.Snapshot(
        0.0, rows, more, {"models": queue, "control": 1}, [worker(number) for number in range(workers)]
    )


def drawn(
    shown: top_data.Snapshot,
    size: tuple[int, int] = (130, 24),
    view: View = top_view.View(),
    problem: str | None = None,
) -> list[str]:
    screen = console.Console(width=size[0], height=size[1], no_color=True)
    with screen.capture() as caught:
        screen.print(top_view.screen(shown, view, "http://x", problem, size))
    return [line.rstrip() for line in caught.get().splitlines()]


def test_everything_is_shown_on_a_wide_terminal() -> None:
    lines = "\n".join(drawn(snapshot()))
    for words in (
        *("batch_00000000000000000000000001", "in_progress", "1,234/50,000", "12.3", "2,346", "1h01m"),
        *(
            "1,100 queued, 64 leased, 1 worker, 56 tokens/s, 1 step of jobs waits (checking",
            "≤128 1,000  ≤512 100",
        ),
        *("host-0", "5/64", "55.5", "40%", "q quit"),
    ):
        assert words in lines


@pytest.mark.parametrize("size", [(40, 10), (59, 12), (80, 24), (100, 15), (200, 60), (20, 5)])
def test_it_fits_any_terminal_without_wrapping(size: tuple[int, int]) -> None:
    lines = drawn(snapshot(jobs=100, models=9, workers=50, more=True), size)
    assert len(lines) <= max(size[1], 10)
    assert max(map(len, lines)) <= size[0]


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_shows_fewer_numbers_but_cuts_none(width: int) -> None:
    lines = drawn(snapshot(jobs=3, models=2, workers=2), (width, 24))
    for words in ("1,234/50,000", "1h01m", "2,200 queued", "1,100", "64", "5/64", "55.5"):
        assert any(words in line for line in lines), words
    cut = [word for line in lines for word in line.split() if word.endswith("…") and word[0].isdigit()]
    assert not cut
    assert width >= 80 or not any("·" in line for line in lines), "the bar gives way first"


@pytest.mark.parametrize("width", [40, 60, 72, 80, 120])
@pytest.mark.parametrize("state", ["in_progress", "validating"])
def test_an_id_that_can_be_copied_and_a_whole_state_are_shown_at_any_width(width: int, state: str) -> None:
    shown = replace(snapshot(), jobs=[row(1, status=state), row(2, status=state)])
    lines = drawn(shown, (width, 24))
    words = " ".join(lines).split()
    assert words.count(state) == 2
    assert {row(1).id, row(2).id} <= set(words)


def test_the_bar_is_what_gives_way_first() -> None:
    lines = "\n".join(drawn(snapshot(), (107, 24)))
    assert "·" not in lines
    assert "smol" in lines.split("model", 2)[1]


def test_where_a_job_takes_two_lines_all_stays_within_the_terminal() -> None:
    for lines in range(10, 30):
        assert len(drawn(snapshot(jobs=50, models=3, workers=9, more=True), (60, lines))) == lines


def test_it_fills_the_terminal_to_the_last_line_and_no_further() -> None:
    for jobs in (0, 1, 3, 50):
        assert len(drawn(snapshot(jobs=jobs), (130, 24))) == 24


def test_nothing_there_says_what_to_do() -> None:
    empty = snapshot(0, 0, 0)
    lines = "\n".join(drawn(empty))
    for words in ("longhaul submit", "set LONGHAUL_MODELS", "Start one: 'celery -A worker worker'"):
        assert words in lines
    assert "older" in "\n".join(drawn(replace(empty, workers=None)))


def test_a_problem_is_on_the_last_line_and_the_rest_stays() -> None:
    lines = drawn(snapshot(), problem="No answer. Trying again.")
    assert lines[-1] == "No answer. Trying again."
    assert "batch_00" in "\n".join(lines)


def test_a_job_that_stands_still_says_why_on_the_last_line() -> None:
    shown = replace(snapshot(), jobs=[row(), row(1, standstill="no worker runs smol: disk full")])
    assert drawn(shown)[-1].endswith("1: no worker runs smol: disk full")


def test_a_hostile_name_moves_no_cursor() -> None:
    shown = replace(snapshot(), jobs=[row(model="\x1b[2J\x07[red]x")], workers=[worker(id="a\x1b]0;b\x07")])
    lines = "\n".join(drawn(shown, (200, 24)))
    assert "\x1b" not in lines
    assert "\x07" not in lines
    assert "[red]x" in lines


def test_jobs_scroll_by_what_is_above_and_not_past_the_end() -> None:
    shown = snapshot(jobs=30)
    room = top_view.heights(shown, SIZE).jobs
    down = top_view.scrolled(View(), 1, shown, SIZE)
    assert down.above == (shown.jobs[0].id,)
    assert down.after == shown.jobs[0].id
    assert len(top_view.scrolled(View(), 10**9, shown, SIZE).above) == 30 - room
    assert top_view.scrolled(down, -5, shown, SIZE) == View()
    assert top_view.scrolled(View(), 5, snapshot(jobs=3), SIZE) == View()


def test_pages_follow_each_other_without_a_gap_also_before_the_server_has_answered() -> None:
    shown = snapshot(jobs=24, more=True)
    page = top_view.heights(shown, SIZE).jobs
    first = top_terminal.turned(View(), "page", shown, SIZE)
    second = top_terminal.turned(first, "page", shown, SIZE)
    assert len(first.above) == page
    assert second.above == tuple(row.id for row in shown.jobs[:23]), "one stays, to go on behind"
    assert top_terminal.turned(second, "page", replace(shown, after="another"), SIZE) == second
    assert "batch_" + "0" * 24 + "23" in "\n".join(drawn(shown, view=second))


def test_tab_chooses_the_list_that_moves() -> None:
    shown = snapshot(workers=50)
    view = top_view.focused(top_view.focused(View()))
    assert view.focus == "workers"
    moved = top_view.scrolled(view, 3, shown, SIZE)
    assert moved.above == ()
    assert "host-3" in "\n".join(drawn(shown, view=moved))
    assert "host-0" not in "\n".join(drawn(shown, view=moved)).split("worker ", 1)[1].split()[:8]
    assert (
        top_view.scrolled(moved, 10**9, shown, SIZE).moved["workers"]
        == 50 - top_view.heights(shown, SIZE).workers
    )
    assert top_view.focused(view).focus == "jobs"


def test_keys_are_told_apart_from_what_is_none() -> None:
    assert top_terminal.parsed(b"jk\x1b[A\x1bOB\x1b[6~x\x1b[99~\tq") == [
        *("down", "up", "up", "down", "page", "next", "quit")
    ]
