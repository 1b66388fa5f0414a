"""No serious finding of axe-core, in light and dark and on a narrow screen, in any view."""

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from jobs.ledger_fleet import Present
from jobs.settings import Settings
from tests.integration.api import serving
from tests.integration.api.conftest import keyed
from tests.integration.api.serving import Api, Hand
from tests.integration.page.conftest import Open

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "narrow": {"viewport": {"width": 400, "height": 800}},
}
pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious(api: Api, visit: Open, look: str) -> None:
    # axe-core puts a script into the page, which the page's own policy forbids.
    page = visit(api.url, bypass_csp=True, **LOOKS[look])
    expect(page.get_by_role("heading", name="No jobs yet")).to_be_visible()
    check(page)
    broken, running = jobs(api)
    few = api.create("a")
    hand = Hand(api.context, few, 1)
    hand.begin()
    hand.part((0, "a", False))
    for path in ("", f"job/{running}", f"job/{broken}", f"job/{few}", "queue", "job/batch_none", "nothing"):
        page.goto(f"{api.url}/#/{path}")
        expect(page.get_by_text("Loading…")).to_have_count(0)
        if path == f"job/{few}":
            expect(page.get_by_role("table", name="Percentiles")).to_be_visible()
        if path == f"job/{running}":
            expect(page.get_by_role("img", name="End to end")).to_be_visible()
            for one in page.get_by_text("Numbers", exact=True).all():
                one.click()
        check(page)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{path} is wider than the screen"
    page.goto(f"{api.url}/#/job/{running}")
    page.get_by_role("button", name="Cancel job").click()
    check(page)


@pytest.mark.parametrize("look", LOOKS)
def test_axe_finds_nothing_serious_where_a_key_is_asked_for(
    settings: Settings, visit: Open, look: str
) -> None:
    keyed(settings, "one")
    with serving.serve(settings) as api:
        page = visit(api.url, bypass_csp=True, **LOOKS[look])
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        check(page)
        page.keyboard.type("lh_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not known")
        check(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_narrow_screen_shows_tables_as_labelled_lines_and_they_stay_tables(api: Api, visit: Open) -> None:
    model = api.context.settings.fingerprints[serving.MODEL]
    name = "gpu-node-17.cluster.example.org-4711"
    api.context.ledger.fleet.report(Present(name, "host", 1, model, "serving", running=3, capacity=8))
    _, running = jobs(api)
    page = visit(f"{api.url}/#/queue", **LOOKS["narrow"])
    cells = page.get_by_role("table", name="All workers").get_by_role("cell")
    expect(cells).to_have_count(10)
    expect(page.get_by_role("columnheader", name="Prefix hits")).to_have_count(1)
    label = "getComputedStyle(document.querySelector('td[data-label=Held]'), '::before').content"
    assert "Held" in page.evaluate(label)
    for path in ("queue", f"job/{running}"):
        page.goto(f"{api.url}/#/{path}")
        expect(page.get_by_role("table").first).to_be_visible()
        widths = "[...document.querySelectorAll('.scroll')].map((one) => one.scrollWidth - one.clientWidth)"
        assert max(page.evaluate(widths)) <= 0


def jobs(api: Api) -> tuple[str, str]:
    """Make a job that failed, and one that runs and has errors."""
    broken = api.create("a")
    Hand(api.context, broken, 1).fail("invalid_json_line", 1)
    name = "a long name of a job that somebody made"
    running = api.create(*"abcdefg", metadata={"name": name, "k": "v"})
    hand = Hand(api.context, running, 7)
    hand.begin()
    hand.part((0, "b" * 500, True), *[(row, str(row), False) for row in range(1, 6)])
    return broken, running


def check(page: Page) -> None:
    found = Axe().run(page).response["violations"]
    told = [(one["impact"], one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]
    assert not told
