"""What planning costs, from token ids: the job's plan on disk, and the engine's own in memory."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.workloads import Workload
from jobs import bodies
from jobs.prepared import Prepared
from jobs.records import JobRecord
from jobs.settings import Settings
from jobs.store_local import LocalStore
from jobs.window import Window
from worker.engine import EngineConfig, Request, Sampling, kv, loader
from worker.engine.fast import FastEngine
from worker.engine.runner import StorageRunner
from worker.engine.step import Step

_ENDPOINT = "/v1/completions"
_MODEL = "bench"
_MEMORY_BYTES = 1 << 30


class NoModel(StorageRunner):
    """A runner that computes nothing: its logits are zeros, and its keys and values as small as can be."""

    def __init__(self, vocabulary: int) -> None:
        self.layout = kv.Layout(((1, 1, 1),), torch.float32, torch.device("cpu"))
        self.reads_beyond = False
        self._vocabulary = vocabulary

    def step(self, step: Step) -> torch.Tensor:
        return torch.zeros(len(step.wanted), self._vocabulary)


def measure(workload: Workload, repeats: int) -> dict[str, Any]:
    """Return the medians of both, in seconds.

    `job_plan_seconds`: deduplicate, sort and write the shards, window by window, to a store on disk.
    `engine_plan_seconds`: add all of them to an engine (the trie and the order), then run one step without a
    model, since an engine may leave work for its first step.
    """
    return {
        "n": len(workload),
        "prompt_tokens": sum(len(prompt) for prompt, _ in workload),
        "job_plan_seconds": statistics.median(job_plan_seconds(workload) for _ in range(repeats)),
        "engine_plan_seconds": statistics.median(engine_plan_seconds(workload) for _ in range(repeats)),
    }


def job_plan_seconds(workload: Workload) -> float:
    """Plan a job of greedy requests whose lines are read, rendered and tokenized already."""
    settings = Settings.load()
    record = JobRecord("batch_0", "default", _ENDPOINT, "file", "input.jsonl", "24h", 0.0, 1e12)
    prepared = list(_prepared(workload))
    with tempfile.TemporaryDirectory(prefix="longhaul-bench-") as folder:
        store = LocalStore(Path(folder) / "store")
        started = time.perf_counter()
        shard = 0
        for first in range(0, len(workload), settings.plan_window_requests):
            with Window(Path(folder)) as window:
                for request in prepared[first : first + settings.plan_window_requests]:
                    assert isinstance(request.prompt, list)
                    window.add(record, request, request.prompt)
                for planned in window.shards(record, _MODEL, settings.shard_requests):
                    store.put(f"plan/{shard:06}.jsonl", b"".join(r.to_json() + b"\n" for r in planned))
                    shard += 1
        return time.perf_counter() - started


def engine_plan_seconds(workload: Workload) -> float:
    """Add requests to a fast engine and run its first step, the model's own time not included."""
    vocabulary = 1 + max(max(prompt) for prompt, _ in workload)
    # Two tokens at least, so that no request ends in this step, which would need a tokenizer.
    requests = [
        Request(str(i), prompt, Sampling(max(2, output), temperature=0.0))
        for i, (prompt, output) in enumerate(workload)
    ]
    longest = max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
    loaded = loader.Loaded(None, None, longest, vocabulary, frozenset(), 0, torch.device("cpu"))
    engine = FastEngine(loaded, EngineConfig(kv_memory_bytes=_MEMORY_BYTES), NoModel(vocabulary))
    started = time.perf_counter()
    engine.add(requests)
    engine.step()
    return time.perf_counter() - started


def _prepared(workload: Workload) -> Iterator[Prepared]:
    body = bodies.read(_ENDPOINT, {"model": _MODEL, "prompt": [0], "max_tokens": 1, "temperature": 0})
    params = body.params()
    for row, (prompt, output) in enumerate(workload):
        yield Prepared(row, f"request-{row}", prompt, False, params | {"max_tokens": output})
