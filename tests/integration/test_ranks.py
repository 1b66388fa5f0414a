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

from jobs import servers
from tests.integration import celery_worker
from tests.unit.engine import architectures
from worker.engine import tiny

_SECONDS = 60


class Ranks:
    """A running torchrun with the log of all ranks."""

    def __init__(self, redis_url: str, directory: Path, model: Path) -> None:
        self._log = directory / "ranks.log"
        models = json.dumps({"tiny": {"source": str(model)}})
        port = str(servers.free_port())
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *torchrun, "-m", "worker.ranks", "--loglevel", "info"],
                env=celery_worker.environment(
                    redis_url,
                    directory,
                    LONGHAUL_MODELS=models,
                    LONGHAUL_DRAIN_SECONDS="10",
                    LONGHAUL_KV_MEMORY_BYTES="10000000",
                    CUDA_VISIBLE_DEVICES="",
                    OMP_NUM_THREADS="1",
                ),
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
        celery_worker.wait_until(lambda: self.event(name), f"{name}: {self.log[-3000:]}", _SECONDS)
        found = self.event(name)
        assert found
        return found

    def end(self) -> int:
        return self.process.wait(_SECONDS)


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Callable[[Path], Ranks]]:
    started: list[Ranks] = []

    def begin(model: Path) -> Ranks:
        started.append(Ranks(redis_url, tmp_path, model))
        return started[-1]

    yield begin
    for ranks in started:
        if ranks.process.poll() is None:
            ranks.process.terminate()  # a torchrun that is killed leaves its ranks behind
            ranks.process.wait(_SECONDS)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_a_signal_to_all_ranks_drains_and_the_others_end_when_rank_0_does(
    start: Callable[[Path], Ranks], tmp_path: Path, number: signal.Signals
) -> None:
    ranks = start(tiny.tiny_model(tmp_path / "tiny"))
    ranks.wait_event("serving")
    ranks.wait_event("following")
    ranks.process.send_signal(number)
    ranks.end()
    assert ranks.wait_event("drained")
    assert ranks.wait_event("stopped")["drained"] is True
    assert ranks.wait_event("followed")
    assert ranks.event("a rank that follows failed") is None, ranks.log
    assert ranks.told == []


def test_the_worker_ends_when_a_rank_dies(start: Callable[[Path], Ranks], tmp_path: Path) -> None:
    ranks = start(tiny.tiny_model(tmp_path / "tiny"))
    ranks.wait_event("serving")
    os.kill(ranks.wait_event("following")["pid"], signal.SIGKILL)
    assert ranks.end() != 0
    assert ranks.wait_event("stopped")


def test_a_model_without_a_plan_is_refused_with_one_line(
    start: Callable[[Path], Ranks], tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.tiny_model(tmp_path / "tiny"))
    tokenizer.save_pretrained(tmp_path / "gpt2")
    architectures.build("gpt2").save_pretrained(tmp_path / "gpt2")
    ranks = start(tmp_path / "gpt2")
    assert ranks.end() != 0
    (line,) = ranks.told
    assert "transformers has no plan to spread a gpt2 model over several ranks" in line
