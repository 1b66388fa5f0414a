"""The page while servers go away and come back, and its key."""

import os
import sys
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from jobs import embedded, keys, servers
from jobs.settings import Settings
from tests.integration.api import serving
from tests.integration.api.conftest import changed, keyed
from tests.integration.page.conftest import Open
from tests.integration.system.system import environment

pytestmark = pytest.mark.timeout(120)


def test_redis_goes_away_and_comes_back_under_the_page(
    settings: Settings, tmp_path: Path, visit: Open
) -> None:
    first = embedded.RedisServer(tmp_path / "redis", tmp_path / "redis.log")
    first.wait_ready()
    with serving.serve(changed(settings, redis_url=first.url)) as api:
        api.create("a")
        page = visit(api.url)
        expect(page.get_by_role("row")).to_have_count(2)
        expect(page.locator("#live")).to_have_text("Live")
        first.server.stop()
        expect(page.locator("#notice")).to_contain_text("does not answer", timeout=20_000)
        expect(page.locator("#notice")).to_contain_text("Shown is what was known at")
        expect(page.locator("#live")).to_have_text("Waiting…")
        expect(page.get_by_role("row")).to_have_count(2)
        # Of a view that was never loaded nothing is known.
        page.goto(f"{api.url}/#/queue")
        away = "The queue (Redis) does not answer at the moment. Trying again."
        expect(page.locator("#notice")).to_have_text(away)
        expect(page.get_by_text("Loading…")).to_be_visible()
        expect(page.locator("#live")).to_have_text("Waiting…")
        page.goto(f"{api.url}/#/")
        again = embedded.RedisServer(tmp_path / "redis", tmp_path / "redis2.log", port=first.port)
        again.wait_ready()
        try:
            expect(page.locator("#notice")).to_be_empty(timeout=30_000)
            expect(page.locator("#live")).to_have_text("Live")
            serving.until(lambda: api.http.get("/readyz").status_code == 200)
            api.create("b")
            expect(page.get_by_role("row")).to_have_count(3)
        finally:
            again.server.stop()


def test_a_key_that_no_header_carries_is_told_at_once(settings: Settings, visit: Open) -> None:
    (one,) = keyed(settings, "one")
    with serving.serve(settings) as api:
        page = visit(api.url)
        page.get_by_label("Key", exact=True).fill("lh\u2026key")
        page.get_by_role("button", name="Open").last.click()
        expect(page.get_by_role("alert")).to_contain_text("no key has")
        page.get_by_label("Key", exact=True).fill(one["Authorization"].split()[1])
        page.get_by_role("button", name="Open").last.click()
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


def test_an_api_that_restarts_is_noticed_and_found_again(
    settings: Settings, free_port: int, tmp_path: Path, visit: Open
) -> None:
    def start(name: str) -> servers.Server:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LONGHAUL")}
        clean |= environment(settings)
        command = [sys.executable, "-m", "api", "--port", str(free_port)]
        started = servers.Server("API", command, tmp_path / name, environment=clean)
        started.wait_ready(answers, 30)
        return started

    def answers() -> bool:
        try:
            return httpx.get(f"{url}/healthz").is_success
        except httpx.TransportError:
            return False

    url = f"http://127.0.0.1:{free_port}"
    first = start("first.log")
    page = visit(url)
    expect(page.locator("#live")).to_have_text("Live")
    first.stop()
    expect(page.locator("#notice")).to_contain_text("The API does not answer", timeout=20_000)
    expect(page.locator("#live")).to_have_text("Reconnecting…")
    second = start("second.log")
    try:
        expect(page.locator("#notice")).to_be_empty(timeout=40_000)
        expect(page.locator("#live")).to_have_text("Live")
    finally:
        second.stop()


def test_a_key_is_asked_for_kept_for_the_tab_and_shows_its_tenant_s_jobs_only(
    settings: Settings, visit: Open
) -> None:
    one, two = keyed(settings, "one", "two")
    with serving.serve(settings) as api:
        mine = {
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "requests": [serving.line("a")],
        }
        job = api.http.post("/v1/batches", json=mine, headers=one).json()["id"]
        other = api.http.post("/v1/batches", json=mine, headers=two).json()["id"]
        page = visit(f"{api.url}/#/")
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        expect(page.get_by_role("alert")).to_be_empty()
        page.get_by_label("Key").fill("lh_wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("That key is not known.")
        expect(page.get_by_label("Key", exact=True)).to_be_focused()
        page.get_by_label("Key").fill(one["Authorization"].removeprefix("Bearer "))
        page.keyboard.press("Enter")
        expect(page.get_by_role("row").filter(has_text=job[-8:])).to_be_visible()
        expect(page.get_by_text(other[-8:])).to_have_count(0)
        new = api.http.post("/v1/batches", json=mine, headers=one).json()["id"]
        expect(page.get_by_role("row").filter(has_text=new[-8:])).to_be_visible()
        page.reload()
        expect(page.get_by_role("row").filter(has_text=job[-8:])).to_be_visible()
        page.goto(f"{api.url}/#/job/{other}")
        expect(page.get_by_role("heading", name="Not found")).to_be_visible()
        keys.revoke(api.context.store, one["Authorization"].split("_")[1])
        expect(page.get_by_role("alert")).to_contain_text("not known any more", timeout=30_000)
        page.get_by_label("Key").fill(two["Authorization"].removeprefix("Bearer "))
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Forget key").click()
        expect(page.get_by_role("alert")).to_be_empty()
        expect(page.get_by_label("Key")).to_be_visible()
        assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
