"""The recorded run of scaling: what it writes is what happened."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.scale import recording

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
Lines = list[dict[str, Any]]


def recorded(out: Path, *options: str) -> tuple[Lines, dict[str, float]]:
    """Run it; return the lines it wrote and the figures it printed."""
    command = [sys.executable, "-m", "bench.scale_run", "-o", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = map(json.loads, done.stdout.splitlines())
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return lines, {line["figure"]: line["value"] for line in figures}


def steps(figures: dict[str, float]) -> dict[str, float]:
    """Return the parts of the time to the first token."""
    prefix = "first_token."
    return {
        name.removeprefix(prefix).removesuffix("_seconds"): value
        for name, value in figures.items()
        if name.startswith(prefix)
    }


def test_a_run_goes_from_no_worker_to_two_and_back(tmp_path: Path) -> None:
    lines, figures = recorded(tmp_path / "run.jsonl", "--echo", "--requests", "24", "--jobs", "6")
    samples = [line for line in lines if "depth" in line]
    assert sum("posted" in line for line in lines) == 7
    reasons = [line["reason"] for line in lines if line.get("event") == "scale"]
    assert (reasons[0], reasons[-1]) == ("1 unit of a job is open", "nothing is left")
    for at_rest in (samples[0], samples[-1]):
        states = [at_rest[state] for state in recording.STATES]
        assert (at_rest["depth"], states) == (0, [0, 0, 0])
    assert figures["requests"] == figures["completed"] == 7 * 24
    assert figures["sampled_tokens"] == 7 * 24 * 64
    assert figures["burst_tokens"] == 6 * 24 * 64
    assert figures["most_serving"] == 2


def test_a_model_leaves_a_trace_of_each_step_to_its_first_token(tmp_path: Path, tiny: Path) -> None:
    options = ("--model", str(tiny), "--requests", "4", "--jobs", "1", "--max-tokens", "4")
    _, figures = recorded(tmp_path / "run.jsonl", *options)
    found = steps(figures)
    assert list(found) == list(recording.STEPS)
    assert min(found.values()) >= 0
    assert min(found["process_and_imports"], found["model_imports"], found["prefill"]) > 0
    assert sum(found.values()) == pytest.approx(figures["first_token_seconds"], abs=0.01)
    assert figures["completed"] == 8
