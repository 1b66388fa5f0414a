"""A job that stands still says why, in the words of the commands, and tells no time left."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from jobs import client, standstill
from jobs.ledger_fleet import Present
from tests.integration.api import serving
from tests.integration.api.serving import Api, Hand
from tests.integration.page.conftest import Open

LOADS = "a minute or more on the first run, as kernels are compiled"
_PICKED = """async ([batch, queue]) => {
  const { waits } = await import("./page/waiting.js");
  return waits(batch, queue);
}"""


def test_a_job_says_why_it_stands_still_while_it_does(api: Api, visit: Open) -> None:
    job = api.create(*map(str, range(20)))
    model = api.context.settings.fingerprints[serving.MODEL]

    def worker(state: str) -> None:
        api.context.ledger.fleet.report(Present("w", "h", 1, model, state, capacity=8))

    page = visit(f"{api.url}/#/job/{job}")
    waiting = page.locator(".summary .waits")
    expect(waiting).to_have_text("Waiting: no worker is there. Queue and workers")
    assert commands_say(api, job) == standstill.NOBODY
    assert page.evaluate("getComputedStyle(document.querySelector('.badge svg')).animationName") == "none"
    worker("loading")
    expect(waiting).to_contain_text(f"Waiting: a worker is loading the model, {LOADS}.")
    hand = Hand(api.context, job, 20)
    hand.begin()
    assert hand.unit is not None
    api.context.ledger.add_shards(hand.unit, ["1"], 20)
    expect(waiting).to_contain_text(f"Waiting: a worker is loading the model m, {LOADS}.")
    worker("serving")
    expect(waiting).to_be_hidden()
    hand.part(*[(row, str(row), False) for row in range(8)])
    expect(tile(page, "Time left")).not_to_have_text("\N{EN DASH}")
    worker("retiring")
    expect(waiting).to_contain_text("Waiting: no worker is there.")
    for name in ("Time left", "Tokens/s", "Requests/s"):
        expect(tile(page, name)).to_have_text("\N{EN DASH}")
    expect(page.locator("#announcer")).to_have_text("Waiting: no worker is there.", timeout=20_000)


@pytest.mark.parametrize("width", [1280, 400])
def test_the_list_says_which_jobs_stand_still(api: Api, visit: Open, width: int) -> None:
    job = api.create("a")
    page = visit(api.url, viewport={"width": width, "height": 800})
    row = page.get_by_role("row").filter(has_text=job[-8:])
    expect(row.locator(".waits")).to_have_text("Waiting: no worker is there")
    api.context.ledger.fleet.report(Present("planner", "h", 1, None, "serving"))
    expect(row.locator(".waits")).to_be_hidden()
    unit = api.context.ledger.claim_unit("plan")
    assert unit is not None
    api.context.ledger.release_unit(unit, 60, "no such file.")
    expect(row.locator(".waits")).to_have_text(f"Waiting: {(commands_say(api, job) or '').rstrip('.')}")
    expect(row.locator(".waits")).to_contain_text("its step 'plan' has failed once")
    new = api.create("b")
    api.context.ledger.fleet.report(Present("planner", "h", 1, None, "retiring"))
    row = page.get_by_role("row").filter(has_text=new[-8:])
    expect(row.locator(".waits")).to_have_text("Waiting: no worker is there")


@pytest.mark.parametrize(
    ("status", "queue", "reason"),
    [
        ("in_progress", {"failing": [{"batch": "x", "waits": "step"}]}, "model"),
        ("in_progress", {"failing": [{"batch": "b", "waits": "step"}]}, "step"),
        ("in_progress", {"models": [{"model": "m", "waits": None}]}, None),
        ("in_progress", {"models": []}, "all"),
        ("validating", {}, "all"),
        ("finalizing", {"waits": None}, None),
        ("completed", {}, None),
    ],
)
def test_a_reason_is_a_job_s_own_or_that_of_its_model_or_that_of_all(
    api: Api, visit: Open, status: str, queue: dict[str, Any], reason: str | None
) -> None:
    whole = {"failing": [], "models": [{"model": "m", "waits": "model"}], "waits": "all"} | queue
    assert visit(api.url).evaluate(_PICKED, [{"id": "b", "model": "m", "status": status}, whole]) == reason


def commands_say(api: Api, job: str) -> str | None:
    batch = client.Batch.model_validate(api.http.get(f"/v1/batches/{job}").json())
    return standstill.why(batch, standstill.QueueView.model_validate(api.http.get("/v1/queue").json()))


def tile(page: Page, name: str) -> Any:
    return page.locator(".tiles > div").filter(has=page.get_by_text(name, exact=True)).locator("dd")
