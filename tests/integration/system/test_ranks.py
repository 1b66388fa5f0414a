"""A worker whose model is spread over two ranks, started by torchrun as a user would."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jobs import ports
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.integration.celery_worker import wait_until
from tests.integration.system.system import MODEL, System, environment, said
from tests.unit.engine import architectures

_SECONDS = 60
Start = Callable[..., System]


class Ranks:
    """A running torchrun with the log of all ranks."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._log = directory / "ranks.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LONGHAUL_")}
        here = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        port = str(ports.take())
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, "-m", "worker.ranks", "--loglevel", "info"],
                env=clean | environment(settings) | here,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def told(self) -> list[str]:
        """What the ranks say to a user."""
        return [line for line in self.log.splitlines() if line.startswith("longhaul: ")]

    def event(self, name: str) -> dict[str, Any] | None:
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return next((event for event in lines if event["event"] == name), None)

    def wait_event(self, name: str) -> dict[str, Any]:
        wait_until(lambda: self.event(name), f"{name}: {self.log[-3000:]}", _SECONDS)
        found = self.event(name)
        assert found
        return found

    def end(self) -> int:
        return self.process.wait(_SECONDS)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[System], Ranks]]:
    started: list[Ranks] = []

    def begin(one: System) -> Ranks:
        started.append(Ranks(one.settings, tmp_path))
        return started[-1]

    yield begin
    for ranks in started:
        if ranks.process.poll() is None:
            ranks.process.terminate()  # a torchrun that is killed leaves its ranks behind
            ranks.process.wait(_SECONDS)


def _system(system: Start, **changes: Any) -> System:
    return system(engine="auto", kv_memory_bytes=10_000_000, **changes)


def test_a_job_is_done_by_two_ranks_which_drain_together(
    system: Start, start: Callable[[System], Ranks]
) -> None:
    one = _system(system)
    ranks = start(one)
    job = one.submit([said(f"r{n}", f"say {n}", max_tokens=6, temperature=0) for n in range(4)])
    counts = one.finished(job, _SECONDS).request_counts
    assert (counts.completed, counts.failed) == (4, 0), ranks.log
    _check_drains(ranks, signal.SIGTERM)


@pytest.mark.long
def test_ctrl_c_drains_all_ranks(system: Start, start: Callable[[System], Ranks]) -> None:
    ranks = start(_system(system))
    ranks.wait_event("serving")
    _check_drains(ranks, signal.SIGINT)


def _check_drains(ranks: Ranks, number: signal.Signals) -> None:
    """Signal torchrun, which passes it on to all ranks."""
    ranks.process.send_signal(number)
    ranks.end()
    assert ranks.wait_event("drained")
    assert ranks.wait_event("stopped")["drained"] is True
    assert ranks.wait_event("followed")
    assert ranks.event("a rank that follows failed") is None, ranks.log
    assert ranks.told == []


def test_the_worker_ends_when_a_rank_dies(system: Start, start: Callable[[System], Ranks]) -> None:
    ranks = start(_system(system))
    ranks.wait_event("serving")
    os.kill(ranks.wait_event("following")["pid"], signal.SIGKILL)
    assert ranks.end() != 0
    assert ranks.wait_event("stopped")


@pytest.mark.long
def test_the_others_end_when_rank_0_dies(system: Start, start: Callable[[System], Ranks]) -> None:
    ranks = start(_system(system))
    rank_0 = int(ranks.wait_event("serving")["worker"].split("-")[-2])
    follower = ranks.wait_event("following")["pid"]
    os.kill(rank_0, signal.SIGKILL)
    assert ranks.end() != 0
    assert ranks.wait_event("a rank that follows failed")
    assert not Path(f"/proc/{follower}").exists()


@pytest.mark.long
def test_a_model_without_a_plan_is_refused_with_one_line(
    system: Start, start: Callable[[System], Ranks], tiny: Path, tmp_path: Path
) -> None:
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
    architectures.build("gpt2").save_pretrained(tmp_path)
    ranks = start(_system(system, models={MODEL: ModelSettings(source=str(tmp_path))}))
    assert ranks.end() != 0
    (line,) = ranks.told
    assert "transformers has no plan to spread a gpt2 model over several ranks" in line
