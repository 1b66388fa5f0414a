"""What it takes to load a model by a method, and to have it: resident memory of a process of its own.

Each figure is the growth over a process that has imported everything and has run a tiny model.
"""

import json
import mmap
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.children import ROOT
from bench.int4_subjects import FULL, Subject
from bench.peers import child
from worker.engine import Engine, EngineConfig, Request, Sampling

_PROMPT = [1, 2, 3]


def measure(found: Subject) -> dict[str, int]:
    """Return `resident_bytes` after a token was made, and `peak_load_bytes` while the model was loaded.

    `resident_file_bytes` of the former are pages of the checkpoint's files, which the system takes back when
    memory is short. The peak is of the first load, which may quantise; what stays is measured when the
    result comes from the disk, as ever after.
    """
    with tempfile.TemporaryDirectory() as scratch:
        first = _in_child(found, scratch)
        again = _in_child(found, scratch) if found.quantised_at_load else first
    return again | {"peak_load_bytes": first["peak_load_bytes"]}


def fp32(source: str) -> dict[str, int]:
    """Return the same of the float32 model."""
    taken = measure(Subject("fp32", 0, source, FULL))
    return {f"{name}_fp32": value for name, value in taken.items()}


def _in_child(found: Subject, scratch: str) -> dict[str, int]:
    """Measure in a new process; raises CalledProcessError."""
    asked = {"source": found.source, "config": asdict(found.config), "quantized": scratch}
    command = [sys.executable, "-m", "bench.int4_memory"]
    done = subprocess.run(
        command, cwd=ROOT, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
    )
    taken: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return taken


def main() -> None:
    """Answer one question on stdin."""
    print(json.dumps(_taken(**json.loads(sys.stdin.read()))))


def _taken(source: str, config: dict[str, Any], quantized: str) -> dict[str, int]:
    from transformers.utils import logging

    from worker.engine.quantize import cache
    from worker.engine.tiny import tiny_model

    logging.disable_progress_bar()
    wanted = EngineConfig(**config | {"preferred_batch_sizes": tuple(config["preferred_batch_sizes"])})
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine.load(str(tiny_model(scratch)), FULL)
        _make_a_token(engine)
        engine.close()
    cache.directory = lambda: Path(quantized)
    before, files_before = _resident_bytes()
    child.forget_peak()
    engine = Engine.load(source, wanted)
    peak = child.peak_bytes()
    _make_a_token(engine)
    resident, files = _resident_bytes()
    return {
        "resident_bytes": resident - before,
        "resident_file_bytes": files - files_before,
        "peak_load_bytes": peak - before,
    }


def _make_a_token(engine: Engine) -> None:
    list(engine.generate([Request("0", _PROMPT, Sampling(1, temperature=0, ignore_eos=True))]))


def _resident_bytes() -> tuple[int, int]:
    """Return resident memory, and how much of it are pages of files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return resident * mmap.PAGESIZE, shared * mmap.PAGESIZE


if __name__ == "__main__":
    main()
