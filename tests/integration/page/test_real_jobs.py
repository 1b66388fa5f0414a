"""The page with real jobs: a real worker, whose engine echoes, runs them meanwhile."""

import json
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from tests.integration.page.conftest import Open
from tests.integration.system.system import System, said

pytestmark = pytest.mark.timeout(180)


def test_a_job_runs_before_the_reader_s_eyes_and_its_results_are_saved(
    system: Callable[..., System], visit: Open
) -> None:
    one = system(faults=("slow:0.3", "raise:BROKEN"), max_running=8)
    page = visit(one.api.url)
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    expect(page.get_by_text("longhaul submit prompts.jsonl --watch")).to_be_visible()

    texts = ["BROKEN" if row == 5 else f"tell me of {row}" for row in range(120)]
    job = one.submit([said(f"r{row}", text, max_tokens=8) for row, text in enumerate(texts)])
    row = page.get_by_role("row").filter(has_text=job[-8:])
    expect(row).to_contain_text("Checking lines")
    one.start_worker()
    expect(row).to_contain_text("Running", timeout=60_000)

    row.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_have_text(job)
    assert page.evaluate("document.activeElement.tagName") == "H1"
    expect(page.get_by_role("img", name="End to end")).to_be_visible(timeout=30_000)
    expect(page.locator(".summary")).to_contain_text("Completed after", timeout=60_000)
    expect(page.locator(".summary")).to_contain_text("120 · 100")
    expect(page.get_by_role("region", name="Requests that failed")).to_contain_text("r5")
    expect(page.get_by_role("img", name="Requests running at once")).to_be_visible()
    expect(page.get_by_role("region", name="Shared prefixes by level")).to_be_visible()

    assert len(saved(page, "Output")) == 119
    assert [one["custom_id"] for one in saved(page, "Errors")] == ["r5"]
    assert len(saved(page, "Metrics")) == 119
    page.go_back()
    expect(page.get_by_role("heading", level=1)).to_have_text("Jobs")
    expect(page.get_by_role("row").filter(has_text=job[-8:])).to_contain_text("Completed")


def test_a_job_is_cancelled_by_keyboard_after_a_question(system: Callable[..., System], visit: Open) -> None:
    one = system(faults=("slow:0.5",), max_running=2)
    one.start_worker().wait_serving()
    job = one.submit([said(f"r{row}", f"tell me of {row}", max_tokens=8) for row in range(200)])
    page = visit(f"{one.api.url}/#/job/{job}")
    expect(page.locator(".summary")).to_contain_text("Running", timeout=30_000)
    page.get_by_role("button", name="Cancel job").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert one.batch(job).status == "in_progress"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".summary")).to_contain_text("Cancelled after", timeout=30_000)
    expect(page.get_by_role("button", name="Cancel job")).to_be_hidden()
    assert one.batch(job).status == "cancelled"


def test_queue_and_workers_are_shown_as_they_change(system: Callable[..., System], visit: Open) -> None:
    one = system(faults=("slow:0.5",), max_running=2)
    page = visit(f"{one.api.url}/#/queue")
    expect(page.get_by_text("No worker is there.")).to_be_visible()
    job = one.submit([said(f"r{row}", f"tell me of {row}", max_tokens=8) for row in range(40)])
    one.start_worker()
    expect(page.get_by_role("region", name="All workers")).to_contain_text("Serving", timeout=60_000)
    expect(page.get_by_role("region", name="Requests that wait")).to_contain_text("to 128: ", timeout=30_000)
    one.finished(job)
    expect(page.get_by_text("No job of yours has anything else to do.")).to_be_visible(timeout=15_000)


def saved(page: Page, name: str) -> list[dict[str, object]]:
    with page.expect_download() as download:
        page.get_by_role("button", name=name, exact=True).click()
    return [json.loads(line) for line in download.value.path().read_text().splitlines()]
