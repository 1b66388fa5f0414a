"""A run that is killed goes on: what it has computed in all is about one pass."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from worker.engine import smollm2

_ROWS, _TOKENS, _RUNNING = 120, 8, 8


class Runs:
    """Runs of one command, each of which notes its tokens."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.out = directory, directory / "out"
        self._source = directory / "rows.jsonl"
        lines = [json.dumps({"id": number, "text": f"Tell of number {number}"}) for number in range(_ROWS)]
        self._source.write_text("\n".join(lines) + "\n")
        self._count = 0

    def start(self) -> subprocess.Popen[bytes]:
        self._count += 1
        command = [
            *(
                sys.executable,
                "-m",
                "tests.integration.dataset.counting_run",
                str(self.tokens_file(self._count)),
            ),
            *("generate", str(self._source), "-o", str(self.out), "--model", str(smollm2.ensure())),
            *("--prompt", "{{ text }}", "--max-tokens", str(_TOKENS), "--max-running", str(_RUNNING)),
        ]
        # Parts often, so that little is lost that was finished.
        environment = os.environ | {"LONGHAUL_FLUSH_SECONDS": "0.2"}
        with (self.directory / f"log-{self._count}").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def tokens_file(self, run: int) -> Path:
        return self.directory / f"tokens-{run}"

    def tokens(self, run: int) -> int:
        place = self.tokens_file(run)
        return int(place.read_text()) if place.exists() else 0

    def end_at(self, tokens: int, number: signal.Signals) -> int:
        """Start a run and end it when it has sampled so many; return its exit status."""
        process = self.start()
        give_up = time.monotonic() + 90
        while self.tokens(self._count) < tokens and process.poll() is None:
            assert time.monotonic() < give_up, (self.directory / f"log-{self._count}").read_text()
            time.sleep(0.02)
        process.send_signal(number)
        return process.wait(60)

    def finish(self) -> int:
        return self.start().wait(100)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_run_that_is_ended_half_way_computes_about_one_pass_in_all(
    tmp_path: Path, number: signal.Signals
) -> None:
    runs = Runs(tmp_path)
    half = _ROWS * _TOKENS // 2
    status = runs.end_at(half, number)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
    assert not list(runs.out.glob("data-*"))
    assert runs.finish() == 0, (tmp_path / "log-2").read_text()
    rows = pq.read_table(runs.out / "data-00000.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(_ROWS))
    one_pass = sum(row["completion_tokens"] for row in rows)
    # Lost is what ran when it was killed, and what had finished since the last part.
    lost = 4 * _RUNNING * _TOKENS if number == signal.SIGKILL else _RUNNING * _TOKENS
    assert one_pass <= runs.tokens(1) + runs.tokens(2) <= one_pass + lost
    assert runs.finish() == 0
    assert runs.tokens(3) == 0


@pytest.mark.long
def test_a_run_that_is_killed_again_and_again_ends_with_each_row_once(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    for _ in range(6):
        runs.end_at(_ROWS * _TOKENS // 6, signal.SIGKILL)
    assert runs.finish() == 0
    rows = pq.read_table(runs.out / "data-00000.parquet").to_pylist()
    assert [row["id"] for row in rows] == list(range(_ROWS))
