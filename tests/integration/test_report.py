"""`longhaul report` of a job that ran on the real system, with an engine that echoes."""

from pathlib import Path
from typing import Any

import httpx
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
        profile = httpx.get(f"{running.api_url}/v1/batches/{job_id}/profile").json()
    assert printed.exit_code == 3
    found = orjson.loads(printed.stdout)
    assert found["counts"] == {"total": 12, "completed": 11, "failed": 1}
    assert (found["computed"], found["deduplicated"]) == (10, 1)
    (error,) = found["errors"]["kinds"].values()
    assert error["examples"] == ["<b>bad</b>"]
    assert profile["errors"]["kinds"] == found["errors"]["kinds"]
    same(profile, found)
    for name, exact in found["summary"]["latency"].items():
        assert {percent: profile["latency"][name][percent] for percent in exact} == exact
    prefixes = found["summary"]["prefixes"]
    assert prefixes["requests"] == 10
    # One token a byte: two beginnings, each of five requests, which go on with a digit of their own.
    begin = len("0 is how all of these begin, and then ")
    assert prefixes["shared"] == 2 * 4 * begin
    page = (tmp_path / "report.html").read_text()
    assert job_id in page
    assert "<b>bad" not in page


def same(profile: dict[str, Any], report: dict[str, Any]) -> None:
    """Check that the page's profile and a report's figures say the same of a finished job."""
    spreads = [(profile[group], report[group]) for group in ("latency", "lengths")]
    pairs = [(one[name], other[name]) for one, other in spreads for name in one]
    for one, other in [*pairs, (profile["timeline"], report["timeline"])]:
        assert one.keys() == other.keys()
        for name, value in one.items():
            # Read in another order: sums differ in their last digits.
            assert value == pytest.approx(other[name], rel=1e-9, abs=0.0015), name
    for name in ("computed", "deduplicated", "retried", "cached_tokens", "computed_prompt_tokens", "missing"):
        assert profile[name] == report[name]


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments)
