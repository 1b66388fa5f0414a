"""`longhaul report` of a job that ran on the real system, with an engine that echoes."""

from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from jobs import cli, ports, stack
from worker.engine import tiny

pytest.importorskip("matplotlib")


def line(custom_id: str, prompt: str, **body: object) -> bytes:
    whole = {"model": "echo", "prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
    request = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": whole}
    return orjson.dumps(request) + b"\n"


def test_report_of_a_job_tells_what_its_plan_shared_and_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    shared = [line(f"r{n}", f"{n % 2} is how all of these begin, and then {n}") for n in range(10)]
    prompts.write_bytes(b"".join([*shared, line("again", "0 is how all of these begin, and then 0")]))
    with prompts.open("ab") as out:
        out.write(line("<b>bad</b>", "x", n=0))
    model = {"source": str(tiny.tiny_model(tmp_path / "model")), "engine": "echo"}
    with stack.Stack(
        tmp_path / "data", models={"echo": model}, store="local", api_port=ports.take()
    ) as running:
        monkeypatch.setenv("LONGHAUL_API_URL", running.api_url)
        job_id = _run("submit", str(prompts), "--watch").stdout.split()[0]
        printed = _run("report", job_id, "--json", "-o", str(tmp_path / "report.html"))
    assert printed.exit_code == 3
    found = orjson.loads(printed.stdout)
    assert found["counts"] == {"total": 12, "completed": 11, "failed": 1}
    assert (found["computed"], found["deduplicated"]) == (10, 1)
    (error,) = found["errors"].values()
    assert error["examples"] == ["<b>bad</b>"]
    prefixes = found["summary"]["prefixes"]
    assert prefixes["requests"] == 10
    # One token a byte: two beginnings, each of five requests, which go on with a digit of their own.
    begin = len("0 is how all of these begin, and then ")
    assert prefixes["shared"] == 2 * 4 * begin
    page = (tmp_path / "report.html").read_text()
    assert job_id in page
    assert "<b>bad" not in page


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)
