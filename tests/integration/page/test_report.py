"""The page and `longhaul report` say the same of a finished job, in the digits they show."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect

from jobs import cli
from tests.integration.page.conftest import Open
from tests.integration.system.system import System, said

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.timeout(300)
UNITS = {"ms": 1e-3, "s": 1.0, "K": 1e3}
NUMBER = r"(?:([0-9]+)\smin\s)?([0-9.,]+)\s?(ms|s|K)?\b"


def test_page_and_report_show_the_same_numbers(
    system: Callable[..., System], visit: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = system(faults=("slow:0.1", "raise:BROKEN"), max_running=4)
    one.start_worker()
    texts = ["BROKEN" if row == 5 else f"tell me {'more and ' * (row % 7)}of {row}" for row in range(40)]
    job = one.submit([said(f"r{row}", text, max_tokens=1 + row % 9) for row, text in enumerate(texts)])
    one.finished(job, 180)
    monkeypatch.setenv("LONGHAUL_API_URL", one.api.url)
    report = orjson.loads(CliRunner().invoke(cli.main, ["report", job, "--json"]).stdout)
    page = visit(f"{one.api.url}/#/job/{job}")
    expect(page.get_by_role("img", name="End to end")).to_be_visible(timeout=30_000)
    spreads = report["latency"] | report["lengths"]
    for title, name in (
        ("End to end", "e2e_seconds"),
        ("Time to first token", "ttft_seconds"),
        ("Waiting in the queue", "queue_seconds"),
        ("Between tokens", "inter_token_seconds"),
        ("Prompt lengths, tokens", "prompt_tokens"),
        ("Output lengths, tokens", "completion_tokens"),
    ):
        for percentile in ("p50", "p90", "p99"):
            shows(page, title, percentile, spreads[name][percentile])
    line = report["timeline"]
    for title, name in (
        ("Output tokens per second", "output_tokens"),
        ("Prompt tokens read per second", "read_tokens"),
    ):
        shows(page, title, "peak", max(line[name]) / line["bin_seconds"])
        shows(page, title, "means over", line["bin_seconds"])
    shows(page, "Requests running at once", "peak", max(line["running"]))
    shows(page, "Requests running at once", "on average", line["mean_running"])
    drawn = tmp_path / "report.html"
    CliRunner().invoke(cli.main, ["report", job, "-o", str(drawn)], catch_exceptions=False)
    (planned,) = re.findall(r"<p>(The plan could share .*?)</p>", drawn.read_text())
    (why,) = re.findall(r"(The plan looks at one bucket .*?)</figcaption>", drawn.read_text())
    sharing = page.get_by_role("region", name="Shared prefixes", exact=True)
    # All or nothing is told without a digit behind the point.
    expect(sharing).to_contain_text(re.sub(r"\((0|100)\.0 %\)", r"(\1 %)", planned))
    expect(sharing).to_contain_text(why)


def shows(page: Page, title: str, word: str, value: Any) -> None:
    """Check that a chart's caption has the value behind a word, as exactly as it is written there."""
    figure = page.locator("figure").filter(has=page.get_by_role("heading", name=title, exact=True))
    text = figure.locator(".facts").inner_text()
    found = re.search(rf"{word} {NUMBER}", text)
    assert found, f"{title}: no {word} in {text!r}"
    digits, unit = found[2].replace(",", "").rstrip("."), UNITS[found[3] or "s"]
    last = 10.0 ** -len(digits.partition(".")[2]) * unit
    shown = 60 * int(found[1] or 0) + float(digits) * unit
    assert shown == pytest.approx(value, abs=0.51 * last, rel=0), f"{title}: {text!r}"
