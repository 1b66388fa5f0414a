"""The protocol of a measured engine, which runs in a process, and often a virtual environment, of its own.

Standard library only. Lines of JSON: the first on stdin is the configuration (`model`, `threads`); the answer
says that the model is loaded. Each further line is a workload, `[[prompt ids, output tokens], ...]`, and is
answered by what running it took. The end of stdin ends the process.
"""

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Workload = list[tuple[list[int], int]]


@dataclass(frozen=True)
class Ran:
    """What a run gave: output ids per request, in order, and how many prompt tokens it computed.

    `prefill_tokens_computed` is None where the engine does not tell; `stats` is whatever else it counted.
    """

    outputs: list[list[int]]
    prefill_tokens_computed: int | None
    stats: dict[str, float] = field(default_factory=dict)


def serve(load: Callable[[dict[str, Any]], Callable[[Workload], Ran]]) -> None:
    """Load an engine and run workloads on it until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    # Libraries print to stdout as they like; only answers may go there.
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        run = load(json.loads(sys.stdin.readline()))
        answer({"ready": True})
        for line in sys.stdin:
            answer(_measured(run, [(prompt, output) for prompt, output in json.loads(line)]))
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


def _measured(run: Callable[[Workload], Ran], workload: Workload) -> dict[str, Any]:
    forget_peak()
    started = time.perf_counter()
    ran = run(workload)
    seconds = time.perf_counter() - started
    for index, ((_, wanted), output) in enumerate(zip(workload, ran.outputs, strict=True)):
        if len(output) != wanted:
            raise ValueError(f"request {index} has {len(output)} output tokens instead of {wanted}")
    return {"seconds": seconds, "peak_bytes": peak_bytes()} | asdict(ran)


def forget_peak() -> None:
    """Let the peak start anew, so that loading and compiling do not count. Linux; elsewhere it stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the largest resident memory since the last `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
