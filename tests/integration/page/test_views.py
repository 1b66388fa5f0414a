"""What the views show: hostile text as text, errors by line, pages of many jobs."""

import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from jobs import download, ids
from jobs.ledger import State
from jobs.records import JobRecord, Manifest
from tests.integration.api.serving import Api, Hand
from tests.integration.page.conftest import Open

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>&amp;\'"</td>'
MANY = 10_000


def test_what_a_job_says_is_shown_as_text(api: Api, visit: Open) -> None:
    job = api.create("a", "b", metadata={"name": HOSTILE + "W" * 400, HOSTILE[:60]: HOSTILE + "W" * 400})
    hand = Hand(api.context, job, 2)
    hand.begin()
    hand.part((0, HOSTILE, False), (1, HOSTILE, True))
    page = visit(api.url)
    expect(page.get_by_role("row").nth(1)).to_contain_text(HOSTILE)
    page.goto(f"{api.url}/#/job/{job}")
    expect(page.get_by_role("region", name="Requests that failed")).to_contain_text(HOSTILE)
    expect(page.locator(".details")).to_contain_text(HOSTILE)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.goto(f"{api.url}/#/job/{'%3Cimg src=x onerror=window.hacked=1%3E'}")
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()
    assert page.evaluate("window.hacked") is None


def test_an_address_that_is_none_is_not_found_and_what_follows_works(api: Api, visit: Open) -> None:
    page = visit(f"{api.url}/#/job/%")
    for name in ("%E0%A4%A", ".", "%2E%2E", "a/b", "%00"):
        expect(page.get_by_role("heading", name="Not found")).to_be_visible()
        page.goto(f"{api.url}/#/queue")
        expect(page.get_by_role("heading", level=1)).to_have_text("Queue and workers")
        page.goto(f"{api.url}/#/job/{name}")
    expect(page.get_by_role("heading", name="Not found")).to_be_visible()
    expect(page.locator("#live")).to_have_text("Live")


def test_errors_of_the_input_are_shown_by_line(api: Api, visit: Open) -> None:
    job = api.create("a")
    Hand(api.context, job, 1).fail("invalid_json_line", 12_345)
    page = visit(f"{api.url}/#/job/{job}")
    region = page.get_by_role("region", name="Errors in the input, by line")
    expect(region).to_contain_text("12,345")
    expect(region).to_contain_text("invalid_json_line")


def test_a_job_of_invalid_input_says_why_in_the_list(api: Api, visit: Open) -> None:
    job = api.create("a")
    Hand(api.context, job, 1).fail("invalid_json_line", 12_345)
    row = visit(api.url).get_by_role("row").nth(1)
    expect(row).to_contain_text("Invalid input: line 12,345: No.")
    expect(row.get_by_role("cell").nth(2)).to_have_text("\u2013")


def test_all_errors_of_requests_can_be_shown_and_read_by_keyboard(api: Api, visit: Open) -> None:
    names = [f"custom-{row}" for row in range(40)]
    job = api.create(*names)
    hand = Hand(api.context, job, len(names))
    hand.begin()
    hand.part(*[(row, name, True) for row, name in enumerate(names[:30])])
    page = visit(f"{api.url}/#/job/{job}")
    region = page.get_by_role("region", name="Requests that failed")
    expect(region.get_by_role("row")).to_have_count(6)
    expect(region.get_by_role("row").nth(4)).to_have_text("4custom-3invalid_valueNo.")
    page.get_by_role("button", name="Show all 30").press("Enter")
    expect(region).to_be_focused()
    expect(region.get_by_role("row")).to_have_count(31)
    page.keyboard.press("End")
    expect(region.get_by_text("custom-29")).to_be_in_viewport()
    # What comes meanwhile takes neither the focus nor the choice.
    hand.part(*[(row, name, True) for row, name in enumerate(names[30:], 30)])
    expect(region.get_by_role("row")).to_have_count(41)
    expect(region).to_be_focused()
    page.get_by_role("button", name="Show the first 5 only").click()
    expect(region.get_by_role("row")).to_have_count(6)


def test_an_address_of_no_view_says_so_and_leads_to_the_jobs(api: Api, visit: Open) -> None:
    page = visit(f"{api.url}/#/nothing")
    for path in ("nothing", "queue/x", "job", "job/", "jobs", "//", "main"):
        page.goto(f"{api.url}/#/{path}")
        expect(page.get_by_text("There is no such view.")).to_be_visible()
        page.get_by_role("link", name="All jobs").click()
        expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()


def test_skipping_to_the_content_stays_in_the_view(api: Api, visit: Open) -> None:
    page = visit(f"{api.url}/#/queue")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.get_by_role("heading", level=1)).to_have_text("Queue and workers")
    assert page.url.endswith("#/queue")


def test_the_command_beside_the_downloads_brings_what_its_words_say(api: Api, visit: Open) -> None:
    job = api.create("a")
    hand = Hand(api.context, job, 1)
    hand.begin()
    hand.part((0, "a", False))
    hand.end()
    hand.finish()
    page = visit(f"{api.url}/#/job/{job}")
    hint = page.get_by_text("All of them into a directory:")
    expect(hint).to_contain_text(f"longhaul results {job} -o results/ --url {api.url}")
    assert set(download.targets(job, "results/")) >= {"output", "errors", "metrics"}


def test_a_list_of_ten_thousand_jobs_is_paged_and_linked(
    api: Api, visit: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    names = sorted((ids.batch_id() for _ in range(MANY)), reverse=True)
    index = Path(api.context.settings.store_url.removeprefix("file://")) / "job-index" / "default"
    index.mkdir(parents=True)
    for name in names:
        (index / name).touch()
    # What nobody looks at needs no record.
    for name in [*names[:101], names[-1]]:
        store_ended(api, name)
    page = visit(api.url)
    expect(page.get_by_role("row")).to_have_count(51)
    asked = "performance.getEntriesByName(new URL('v1/batches?limit=50', location).href)"
    listed = page.evaluate(f"{asked}[0].responseEnd")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    with capsys.disabled():
        print(f"\n{MANY:,} jobs: first contentful paint {paint:.0f} ms, list there after {listed:.0f} ms")
    assert paint < 2000
    page.get_by_role("link", name="Older jobs").click()
    expect(page.get_by_role("row").nth(1)).to_contain_text(names[50][-8:])
    second = page.url
    page.go_back()
    expect(page.get_by_role("row").nth(1)).to_contain_text(names[0][-8:])
    page.goto(second)
    expect(page.get_by_role("row").nth(1)).to_contain_text(names[50][-8:])
    page.get_by_label("Go to a job by its id").fill(names[-1])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(names[-1])


def store_ended(api: Api, name: str) -> None:
    """Store the records of a job that completed."""
    now = time.time()
    record = JobRecord(name, "default", "/v1/chat/completions", "file-x", "k", "24h", now, now + 86400)
    times = {"created_at": now, "in_progress_at": now, "completed_at": now + 60}
    manifest = Manifest(name, State.COMPLETED.value, "m", times, 50_000, 49_990, 10, (9, 5, 7, 0), {})
    api.context.store.put(f"jobs/{name}/job.json", record.to_json())
    api.context.store.put(f"jobs/{name}/manifest.json", manifest.to_json())
