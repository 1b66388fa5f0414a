"""A batch of real prompts through the whole system on this machine: what `make run` shows."""

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from bench import humaneval
from jobs import client, download, errors, places, progress, stack, terminal, values
from worker.engine import smollm2

SYSTEM = (
    "You are a careful Python programmer. Complete the function that the user shows. Answer with code alone."
)
MARK = {"made_by": "bench.demo"}
LATENCIES = {
    "time to first token": "ttft_seconds",
    "waiting in the queue": "queue_seconds",
    "end to end": "e2e_seconds",
}


@click.command()
@click.option("--requests", type=click.IntRange(min=1), default=164, show_default=True)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=4),
    default=96,
    show_default=True,
    help="Of the longest answers; the others are asked for a quarter, a half and three quarters of it.",
)
@click.option(
    "directory",
    "--dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=stack.DEFAULT_DIRECTORY,
    show_default=True,
)
def main(requests: int, max_tokens: int, directory: Path) -> None:
    """Start everything, run a batch of real prompts on a real model, show what came out, and stop."""
    console = terminal.printer()
    models = {smollm2.NAME: {"source": str(smollm2.ensure(report=True))}}
    try:
        with console.status("Starting Redis, SeaweedFS, the API and a worker"):
            running = stack.Stack(directory, models=models)
            running.__enter__()
        try:
            console.print(running.describe(), soft_wrap=True)
            batch = run_batch(running, requests, max_tokens, console)
            show(running, batch, console)
        finally:
            with console.status("Stopping what was started"):
                running.__exit__(None, None, None)
    except errors.LonghaulError as error:
        sys.exit(f"longhaul: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    console.print(
        "Everything is stopped. `make up` starts it again and leaves it running; in a browser, at the address"
        f" that it prints ({running.api_url}/ just now), this batch is among the jobs.",
        soft_wrap=True,
    )
    sys.exit(0 if batch.status == "completed" and not batch.request_counts.failed else 1)


def run_batch(running: stack.Stack, requests: int, max_tokens: int, console: Console) -> client.Batch:
    """Upload a file of prompts, make a batch of it, and watch it to its end."""

    def keep_alive(seconds: float) -> None:
        for line in running.poll():
            console.print(line)
        time.sleep(seconds)

    with client.Client(running.api_url) as api, tempfile.TemporaryDirectory() as folder:
        cancel_earlier(api)
        source = Path(folder) / "prompts.jsonl"
        write_prompts(source, requests, max_tokens)
        with source.open("rb") as stream:
            file_id = api.upload(source.name, stream)
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": MARK,
        }
        batch = api.create(body, idempotency_key=file_id)
        prompts = values.counted(requests, "HumanEval prompt")
        console.print(f"\n{batch.id}: {prompts}, at most {max_tokens} tokens each")
        console.print(f"While it runs: {running.api_url}/#/job/{batch.id} in a browser,", soft_wrap=True)
        command = os.path.relpath(Path(sys.executable).with_name("longhaul"))
        console.print(f"or in another shell: {command} top --url {running.api_url}\n", soft_wrap=True)
        return progress.watch(api, batch.id, progress.view(as_json=False), sleep=keep_alive)


def cancel_earlier(api: client.Client) -> None:
    """Cancel what an interrupted demo left: it would go on now and take this one's time."""
    for batch in api.batches(100):
        if not batch.ended and batch.status != "cancelling" and batch.metadata == MARK:
            api.cancel(batch.id)


def write_prompts(path: Path, count: int, max_tokens: int) -> None:
    """Write a batch file whose answers differ in length, so that they do not all finish at once."""
    with path.open("wb") as out:
        for index, request in enumerate(humaneval.requests(count, smollm2.NAME, max_tokens, SYSTEM)):
            request["body"]["max_tokens"] = max_tokens * (4 - index % 4) // 4
            out.write(orjson.dumps(request) + b"\n")


def show(running: stack.Stack, batch: client.Batch, console: Console) -> None:
    """Bring the result files here; print the figures and the first two completions."""
    folder = running.directory / "results"
    files = places.of_job(folder / f"{batch.id}.jsonl")
    with client.Client(running.api_url) as api:
        download.fetch(api, batch, files)
    summary = orjson.loads(files["summary"].read_bytes())
    console.print(figures(batch, summary))
    console.print(latencies(summary))
    names = "\n".join(f"  {path.name}" for path in files.values())
    console.print(f"Files in {folder}:\n{names}", soft_wrap=True)
    lines = [orjson.loads(line) for line in files["output"].read_bytes().splitlines()[:2]]
    for line in lines:
        text = line["response"]["body"]["choices"][0]["message"]["content"]
        console.print(Panel(escape(text.strip()), title=line["custom_id"], title_align="left"))
    for line in files["errors"].read_bytes().splitlines()[:2]:
        console.print(Panel(escape(line.decode()), title="error", title_align="left", style="red"))


def figures(batch: client.Batch, summary: dict[str, Any]) -> Table:
    """Return the table of counts, tokens and speed."""
    tokens = summary["tokens"]
    speed = summary["tokens_per_second"]
    rows = {
        "status": batch.status,
        "requests": f"{batch.request_counts.completed} of {batch.request_counts.total} completed",
        "failed": str(batch.request_counts.failed),
        "prompt tokens": f"{tokens['prompt']:,} ({tokens['cached']:,} cached)",
        "generated tokens": f"{tokens['completion']:,}",
        "generated tokens/s": f"{speed:,.1f}" if speed else "-",
        "seconds, all in all": f"{summary['seconds']:.1f}",
    }
    table = Table(title=f"Batch {batch.id}", title_justify="left", show_header=False)
    for row in rows.items():
        table.add_row(*row)
    return table


def latencies(summary: dict[str, Any]) -> Table:
    """Return the table of percentiles, in seconds; what is not known is a dash."""
    table = Table("seconds", "p50", "p90", "p99", title="Latency of a request", title_justify="left")
    for label, name in LATENCIES.items():
        found = summary["latency"].get(name)
        cells = [f"{found[p]:.2f}" if found else "-" for p in ("p50", "p90", "p99")]
        table.add_row(label, *cells)
    return table


if __name__ == "__main__":
    main()
