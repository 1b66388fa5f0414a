"""What a job's page tells of it in figures: nothing that will never come, and what the summary has."""

import orjson
import pytest
from playwright.sync_api import expect

from jobs import prefixes
from tests.integration.api.serving import Api, Hand
from tests.integration.page.conftest import Open
from tests.integration.page.test_waiting import tile
from tests.unit.report.test_draw import MARKS

_LABELS = """async (cases) => {
  const { labels } = await import("./page/charts.js");
  return cases.map((marks) => labels(marks, 0.15));
}"""


def test_marks_of_a_histogram_are_named_by_the_rule_of_the_report(api: Api, visit: Open) -> None:
    told = visit(api.url).evaluate(_LABELS, [list(marks.items()) for marks, _ in MARKS])
    for found, (_, wanted) in zip(told, MARKS, strict=True):
        assert [name for name, _ in found] == [name for name, _ in wanted]
        assert [place for _, place in found] == pytest.approx([place for _, place in wanted])


def test_marks_in_one_bar_have_one_label_that_names_them_all(api: Api, visit: Open) -> None:
    page = visit(f"{api.url}/#/job/{ended(api, 6)}")
    marks = page.get_by_role("img", name="Output lengths").locator("text.mark")
    expect(marks).to_have_text(["p50\N{EN DASH}p99"])


def test_a_job_of_invalid_input_has_no_figures_that_will_never_come(api: Api, visit: Open) -> None:
    job = api.create("a")
    page = visit(f"{api.url}/#/job/{job}")
    expect(page.locator(".summary")).to_contain_text("Model not known yet")
    Hand(api.context, job, 1).fail("invalid_json_line", 3)
    expect(page.locator(".summary")).to_contain_text("Failed after")
    expect(page.locator(".summary")).not_to_contain_text("not known")
    expect(page.locator(".tiles")).to_be_hidden()
    expect(page.get_by_role("heading", name="Latencies and lengths")).to_be_hidden()


def test_an_ended_job_has_the_rates_of_its_summary_and_no_time_left(api: Api, visit: Open) -> None:
    job = api.create(*map(str, range(6)))
    hand = Hand(api.context, job, 6)
    hand.begin()
    page = visit(f"{api.url}/#/job/{job}")
    expect(tile(page, "Time left")).to_be_visible()
    hand.part(*[(row, str(row), False) for row in range(6)])
    hand.end()
    hand.finish()
    summary = api.http.get(f"/v1/batches/{job}/metrics").json()
    expect(tile(page, "Tokens/s")).to_have_text(f"{summary['tokens_per_second']:.1f}")
    expect(tile(page, "Requests/s")).to_have_text(f"{6 / summary['running_seconds']:.1f}")
    expect(tile(page, "Time left")).to_be_hidden()


def test_rates_of_a_job_whose_summary_is_away_are_not_those_it_had_at_last(api: Api, visit: Open) -> None:
    job = api.create(*map(str, range(6)))
    hand = Hand(api.context, job, 6)
    hand.begin()
    page = visit(f"{api.url}/#/job/{job}")
    page.route("**/metrics", lambda route: route.abort())
    expect(tile(page, "Tokens/s")).to_be_visible()
    hand.part(*[(row, str(row), False) for row in range(6)])
    hand.end()
    hand.finish()
    expect(page.locator(".summary")).to_contain_text("Completed after")
    expect(tile(page, "Tokens/s")).to_be_hidden()


def test_few_requests_are_told_in_a_table_and_charts_come_with_more(api: Api, visit: Open) -> None:
    job = api.create(*map(str, range(9)))
    hand = Hand(api.context, job, 9)
    hand.begin()
    hand.part(*[(row, str(row), False) for row in range(4)])
    page = visit(f"{api.url}/#/job/{job}")
    told = page.get_by_role("table", name="Latencies and lengths")
    expect(told.get_by_role("row").filter(has_text="Output lengths, tokens")).to_contain_text("444")
    expect(told.get_by_role("row").filter(has_text="Time to first token")).to_contain_text("0.5 s")
    expect(page.get_by_text("Requests running at once: peak 4")).to_be_visible()
    expect(page.get_by_role("img")).to_have_count(0)
    hand.part((4, "4", False))
    expect(page.get_by_role("img", name="Output lengths")).to_be_visible()
    expect(told).to_be_hidden()


def test_shared_prefixes_of_a_cancelled_job_are_said_to_be_of_the_whole_file(api: Api, visit: Open) -> None:
    job = api.create(*map(str, range(9)))
    level = {"runs": 1, "requests": 9, "tokens": 4, "saved": 32}
    plan = {"requests": 9, "tokens": 45, "shared": 32, "levels": [level], "largest": []}
    api.context.store.put(f"jobs/{job}/plan/1/{prefixes.NAME}", orjson.dumps(plan))
    hand = Hand(api.context, job, 9)
    hand.begin()
    hand.part((0, "0", False), (1, "1", False))
    page = visit(f"{api.url}/#/job/{job}")
    api.http.post(f"/v1/batches/{job}/cancel")
    hand.finish()
    sharing = page.get_by_role("region", name="Shared prefixes", exact=True)
    expect(sharing).to_contain_text(
        "The plan could share 32 of 45 prompt tokens (71.1 %); the engine shared "
    )
    expect(sharing).to_contain_text("The plan is of the whole file, of which 7 requests never ran.")
    expect(sharing).to_contain_text("cannot share what it had to forget")
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height < 1800, height


def ended(api: Api, total: int) -> str:
    """Make a job that completed."""
    job = api.create(*map(str, range(total)))
    hand = Hand(api.context, job, total)
    hand.begin()
    hand.part(*[(row, str(row), False) for row in range(total)])
    hand.end()
    hand.finish()
    return job
