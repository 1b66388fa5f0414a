"""Engines being measured, each in a process of its own that loads once and runs what it is told."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from bench.workloads import Workload

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".longhaul" / "peers"
OURS = "longhaul"
PEERS = ("vllm", "openvino", "hf", "fallback")
_OWN_VENV = {"vllm", "openvino", "llamacpp"}
_LOAD_SECONDS = 900.0
_RUN_SECONDS = 3600.0
_TAIL_BYTES = 2000


class ChildFailed(Exception):
    """An engine could not be started, loaded or run."""


@dataclass(frozen=True)
class Run:
    """One run of a workload: see child.Ran; memory is the peak of the engine's process while it ran."""

    seconds: float
    peak_bytes: int
    outputs: list[list[int]]
    prefill_tokens_computed: int | None
    stats: dict[str, float]

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.outputs))


class Child:
    """One engine in a process of its own. A context manager: it is loaded on entry and ended on exit.

    `more` is what else bench/peers/<name>.py reads. Everything but its answers goes to `log`, which has
    `label` in its name where several of one engine run. Raises ChildFailed, with the end of the log.
    """

    def __init__(
        self, name: str, model: Path, threads: int = 2, label: str | None = None, **more: Any
    ) -> None:
        self.name = name
        self.label = label or name
        self.log = VENVS / "logs" / f"{self.label}-{os.getpid()}.log"
        self._configuration: dict[str, Any] = {"model": str(model), "threads": threads} | more
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Child":
        python = interpreter(self.name)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"bench.peers.{self.name}"],
                cwd=ROOT,
                env=_environment(self._configuration["threads"], python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self._ask(self._configuration, _LOAD_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if kind is None:
            self.log.unlink(missing_ok=True)

    def run(self, workload: Workload) -> Run:
        """Run a workload; returns when its last request is done."""
        return Run(**self._ask(workload, _RUN_SECONDS))

    def _ask(self, question: Any, seconds: float) -> dict[str, Any]:
        """Send one line and wait for the answer; an engine that hangs is killed after so long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"ended with {process.wait()}"}
        if "error" in answer:
            raise ChildFailed(f"{self.label}: {answer['error']}\n{self._tail()}\n(all of it: {self.log})")
        return answer

    def _tail(self) -> str:
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()

    def _end(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def interpreter(name: str) -> Path:
    """Return the Python that runs an engine; raises ChildFailed when its environment is not built."""
    if name not in _OWN_VENV:
        return Path(sys.executable)
    python = VENVS / name / "bin" / "python"
    if not python.exists():
        raise ChildFailed(f"{name} is not installed here: make bench-peers ARGS={name}")
    return python


def equal_share(ours: Sequence[list[int]], theirs: Sequence[list[int]]) -> float:
    """Return the share of requests with the same output."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _environment(threads: int, python: Path) -> dict[str, str]:
    """Return ours with as many threads for every library, no network, and the engine's own programs first."""
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    return os.environ | counts | quiet | path
