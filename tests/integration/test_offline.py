"""`longhaul run` as a process of its own: killed, interrupted, started twice."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tests.unit import planning

ROOT = Path(__file__).parents[2]
COMMAND = """
from jobs import cli
from worker import offline
cli.Commands("longhaul", commands={"run": offline.run})(prog_name="longhaul")
"""


class Runs:
    """Runs of one file with an engine whose steps take their time; all are killed in the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = planning.save_tokenizer(directory / "model")
        self.output = directory / "out.jsonl"
        self.started: list[subprocess.Popen[str]] = []
        lines = (planning.line(f"r{n}", f"{n}", max_tokens=-1 if n == 7 else 4) for n in range(40))
        (directory / "in.jsonl").write_bytes(b"".join(lines))

    def start(self, step_seconds: float, *faults: str, **settings: str) -> subprocess.Popen[str]:
        arguments = ["run", str(self.directory / "in.jsonl"), "-o", str(self.output)]
        arguments += ["--model", str(self.model), "--engine", "echo", "--fault", f"slow:{step_seconds}"]
        arguments += [part for fault in faults for part in ("--fault", fault)]
        self.started.append(
            subprocess.Popen(
                [sys.executable, "-c", COMMAND, *arguments, "--max-running", "2"],
                cwd=ROOT,
                env=os.environ | {"LONGHAUL_FLUSH_SECONDS": "0.2", "NO_COLOR": "1"} | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return self.started[-1]

    def parts(self) -> dict[str, bytes]:
        """Return the parts that hold results of the engine."""
        found = {path.name: path.read_bytes() for path in self.directory.glob("*/jobs/*/parts/*.jsonl")}
        return {name: data for name, data in found.items() if b'"metrics":{' in data}

    def wait_for_parts(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.parts()) < count:
            assert time.monotonic() < deadline
            assert self.started[-1].poll() is None, self.started[-1].communicate()[0]
            time.sleep(0.05)

    def names(self, name: str) -> list[str]:
        lines = (self.directory / name).read_bytes().splitlines()
        return [orjson.loads(line)["custom_id"] for line in lines]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()


def test_a_killed_run_goes_on_where_it_was(runs: Runs) -> None:
    first = runs.start(step_seconds=0.3)
    runs.wait_for_parts(2)
    second = runs.start(step_seconds=0)
    message, _ = second.communicate(timeout=60)
    assert second.returncode == 1
    assert "Another run is writing to" in message
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=20)
    kept = runs.parts()
    done = {orjson.loads(line)["row"] for data in kept.values() for line in data.splitlines()}
    assert 0 < len(done) < 39
    assert not runs.output.exists()

    third = runs.start(step_seconds=0)
    message, _ = third.communicate(timeout=60)
    assert third.returncode == 3, message
    assert runs.names("out.jsonl") == [f"r{n}" for n in range(40) if n != 7]
    assert runs.names("out.errors.jsonl") == ["r7"]
    assert kept.items() <= runs.parts().items()
    again = [
        orjson.loads(line)["row"]
        for name in runs.parts().keys() - kept.keys()
        for line in runs.parts()[name].splitlines()
    ]
    assert sorted([*again, *done]) == [n for n in range(40) if n != 7]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_every_row_of_its_last_step(runs: Runs, number: signal.Signals) -> None:
    process = runs.start(step_seconds=0.3)
    runs.wait_for_parts(1)
    process.send_signal(number)
    message, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the same command goes on from here" in message
    rows = [orjson.loads(line)["row"] for data in runs.parts().values() for line in data.splitlines()]
    assert len(rows) == len(set(rows))
    assert len(rows) % 2 == 0
    assert not runs.output.exists()


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ("kill", -signal.SIGKILL, ""),
        ("break", 1, "the run broke off: RuntimeError('an injected fault'). The same command goes on"),
        ("hang", 70, "the engine has been in one step for 2 s. The same command goes on"),
    ],
)
def test_a_line_that_ends_every_run_is_given_up(runs: Runs, fault: str, code: int, message: str) -> None:
    poison = planning.line("poison", "the 99 poison", max_tokens=4)
    with (runs.directory / "in.jsonl").open("ab") as lines:
        lines.write(poison)
    codes = []
    for _ in range(4):
        process = runs.start(0, f"{fault}:99", LONGHAUL_STEP_TIMEOUT_SECONDS="2")
        said, _ = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert process.returncode == 3 or message in said, said
    # Once among others, twice alone; then the others are all there.
    assert codes == [code, code, code, 3]
    assert runs.names("out.jsonl") == [f"r{n}" for n in range(40) if n != 7]
    assert runs.names("out.errors.jsonl") == ["r7", "poison"]
    last = (runs.directory / "out.errors.jsonl").read_bytes().splitlines()[-1]
    assert orjson.loads(last)["error"]["code"] == "worker_lost"
    rows = [orjson.loads(line)["row"] for data in runs.parts().values() for line in data.splitlines()]
    assert len(rows) == len(set(rows))


def test_who_ran_beside_a_killed_run_is_not_given_up(runs: Runs) -> None:
    for _ in range(3):
        process = runs.start(0.3)
        time.sleep(2.5)
        process.kill()
        process.communicate(timeout=20)
    last = runs.start(0)
    last.communicate(timeout=60)
    assert last.returncode == 3
    assert runs.names("out.errors.jsonl") == ["r7"]
