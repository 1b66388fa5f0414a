"""The recorded run of scaling, with an engine that echoes: what it writes is what happened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.scale import recording


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_goes_from_no_worker_to_two_and_back(tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    command = [sys.executable, "-m", "bench.scale_run", "--echo", "--requests", "24", "--jobs", "6"]
    done = subprocess.run([*command, "-o", str(out)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    samples = [line for line in lines if "depth" in line]
    posts = [line for line in lines if "posted" in line]
    assert len(posts) == 7
    reasons = [line["reason"] for line in lines if line.get("event") == "scale"]
    assert (reasons[0], reasons[-1]) == ("1 units of jobs are open", "nothing is left")
    for at_rest in (samples[0], samples[-1]):
        states = [at_rest[state] for state in recording.STATES]
        assert (at_rest["depth"], states) == (0, [0, 0, 0])
    figures = {line["figure"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    assert figures["requests"] == figures["completed"] == 7 * 24
    assert figures["sampled_tokens"] == 7 * 24 * 64
    assert figures["burst_tokens"] == 6 * 24 * 64
    assert figures["most_serving"] == 2
    parts = [value for name, value in figures.items() if name.startswith("first_token.")]
    assert sum(parts) == pytest.approx(figures["first_token_seconds"], abs=0.01)
    assert min(parts) >= 0
