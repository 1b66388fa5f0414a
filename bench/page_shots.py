"""Pictures of the web page and of a report, with a real model at work: `python -m bench.page_shots` writes
docs/page_*.png and docs/report_*.png.
"""

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import orjson
from playwright.sync_api import Browser

from bench import browser, demo, humaneval
from jobs import client, report_command, stack
from worker.engine import smollm2

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 860}, "color_scheme": "dark"},
    "400": {"viewport": {"width": 400, "height": 860}, "color_scheme": "light", "device_scale_factor": 2},
}
SMALL, LARGE = 160, 480


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default="docs", show_default=True)
@click.option("--done-share", default=0.45, show_default=True, help="Of the running job, when it is shown.")
def main(out: Path, done_share: float) -> None:
    """Run jobs on SmolLM2; photograph the report of the first, and the page while the last of them runs."""
    models = {smollm2.NAME: {"source": str(smollm2.ensure(report=True))}}
    with (
        tempfile.TemporaryDirectory() as folder,
        stack.Stack(folder, models=models, store="local") as running,
        client.Client(running.api_url) as api,
        browser.opened() as chromium,
    ):
        out.mkdir(exist_ok=True)
        check = submit(api, {"name": "nightly check"}, with_faults(lines(SMALL)), wait=1.0)
        report = write_report(running.api_url, check, Path(folder, "report.html"))
        for look, options in LOOKS.items():
            shoot_report(chromium, report, out / f"report_{look}.png", options)
        submit(api, {"name": "a file with two bad lines"}, [*lines(4), {"custom_id": "x"}, {}], wait=0)
        submit(api, {"name": "one that was stopped"}, lines(60), wait=0, cancel=True)
        job = submit(api, {"name": "HumanEval, all variants"}, with_faults(lines(LARGE)), wait=done_share)
        submit(api, {"name": "evaluation of tomorrow"}, lines(300), wait=0)
        for look, options in LOOKS.items():
            shoot(chromium, running.api_url, job, out, look, options)


def lines(count: int) -> list[dict[str, Any]]:
    """Return HumanEval requests whose answers differ in length."""
    found = list(humaneval.requests(count, smollm2.NAME, 96, demo.SYSTEM))
    for index, request in enumerate(found):
        request["body"]["max_tokens"] = 24 + 72 * (index * 7 % 11) // 10
    return found


def with_faults(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests, one in sixty of them asking for what is refused."""
    for request in requests[7::60]:
        request["body"]["temperature"] = 7
    for request in requests[40::160]:
        request["body"]["max_tokens"] = 10_000_000
    return requests


def submit(
    api: client.Client,
    metadata: dict[str, str],
    requests: list[dict[str, Any]],
    wait: float,
    cancel: bool = False,
) -> str:
    """Make a batch and wait until that share of it is done; return its id."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.writelines(orjson.dumps(one) + b"\n" for one in requests)
        file.seek(0)
        file_id = api.upload("prompts.jsonl", file)  # type: ignore[arg-type]
    endpoint = {"endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": metadata}
    batch = api.create(endpoint | {"input_file_id": file_id}, idempotency_key=file_id)
    while True:
        batch = api.batch(batch.id)
        if cancel and batch.status == "in_progress":
            batch = api.cancel(batch.id)
            return batch.id
        far = not cancel and wait < 1 and batch.done >= wait * len(requests)
        if batch.ended or far:
            return batch.id
        time.sleep(0.3)


def write_report(url: str, job: str, place: Path) -> Path:
    """Have `longhaul report` draw a job that has ended."""
    with contextlib.suppress(SystemExit):  # which tells that some of its requests failed
        report_command.report.main([job, "--url", url, "-o", str(place)], standalone_mode=False)
    return place


def shoot_report(chromium: Browser, report: Path, picture: Path, options: dict[str, Any]) -> None:
    """Take the picture of a report."""
    page = chromium.new_page(**options)
    page.goto(report.as_uri())
    page.screenshot(path=picture, full_page=options is not LOOKS["400"])
    page.close()


def shoot(chromium: Browser, url: str, job: str, out: Path, look: str, options: dict[str, Any]) -> None:
    """Take the pictures of one look."""
    page = chromium.new_page(**options)
    for name, path in {"job": f"job/{job}", "jobs": "", "queue": "queue"}.items():
        page.goto(f"{url}/#/{path}")
        # Long enough for the stream to have told of a change or two.
        page.wait_for_timeout(4500 if name == "job" else 1500)
        page.screenshot(path=out / f"page_{name}_{look}.png", full_page=name == "job" and look != "400")
    page.close()


if __name__ == "__main__":
    main()
