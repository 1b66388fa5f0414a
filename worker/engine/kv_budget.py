"""How many bytes of KV an engine has: on a card what is measured to be left, else a share of what is free."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from worker.engine import choosing, footprint, loader, parallel, runner, sizing
from worker.engine import device as devices
from worker.engine.rows import RowState
from worker.engine.types import EngineConfig, Request, Row, Sampling

log = logging.getLogger(__name__)
# On a CPU the memory is everybody's: other workers, and whatever else runs on the machine.
_SHARE_OF_FREE = {"cpu": 0.25, "cuda": 0.5}
_UNMEASURED_GRAPH_BYTES = 1 << 30


@dataclass(frozen=True)
class Budget:
    """The bytes that KV takes, and those that recorded steps may take."""

    kv_bytes: int
    graph_bytes: int = 0


class Gauge(Protocol):
    """Measures a card."""

    def free_bytes(self) -> int: ...

    def total_bytes(self) -> int: ...

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Return what `run` holds at most besides what was there before."""
        ...


class Card:
    """Measures a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_bytes(self) -> int:
        return devices.of(self._device).free_bytes()

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def peak_bytes(self, run: Callable[[], object]) -> int:
        return sizing.measured_peak(run, self._device)


def of(
    loaded: loader.Loaded, config: EngineConfig, ready: runner.ModelRunner, gauge: Gauge | None = None
) -> Budget:
    """Return the bytes for KV and graphs beside a model that is ready; raises sizing.DoesNotFit.

    All ranks of a team call it at once, and get what the one with least has.
    """
    if gauge is None:
        if loaded.device.type != "cuda":
            return without_measuring(config, loaded.device)
        gauge = Card(loaded.device)
    gc.collect()  # what the model was tried with is still in memory
    after = gauge.free_bytes()
    peak = gauge.peak_bytes(lambda: _run_largest_step(loaded, config))
    if config.speculate == "draft":
        peak += config.draft_kv_memory_bytes  # is taken with the first draft
    team = parallel.current()
    recorded = config.cuda_graphs and ready.paged and team is None  # a team records no steps
    graphs = _graph_bytes(loaded, config, gauge) if recorded else 0
    if team is not None:
        after = team.least(after - peak) + peak
    before = after if loaded.free_before is None else loaded.free_before
    settings = sizing.Settings(graphs, config.kv_memory_bytes)
    found = sizing.kv_bytes_after_profile(before, after, peak, gauge.total_bytes(), settings)
    page = ready.page_tokens * ready.layout.token_bytes
    if found < page:
        raise sizing.DoesNotFit(f"{sizing.in_gb(found)} are left for KV, less than {sizing.in_gb(page)}")
    names = ("free_before", "free_after", "largest_step", "graphs", "kv")
    sizes = map(sizing.in_gb, (before, after, peak, graphs, found))
    log.info("memory", extra=dict(zip(names, sizes, strict=True)))
    return Budget(found, graphs)


def without_measuring(config: EngineConfig, device: torch.device) -> Budget:
    """Return what the config says for KV, else a share of what is free."""
    share = _SHARE_OF_FREE.get(device.type, 0.25)
    kv_bytes = config.kv_memory_bytes or int(devices.of(device).free_bytes() * share)
    return Budget(kv_bytes, _UNMEASURED_GRAPH_BYTES)


def _graph_bytes(loaded: loader.Loaded, config: EngineConfig, gauge: Gauge) -> int:
    rows = config.max_running
    decode = gauge.peak_bytes(lambda: footprint.forward(loaded.model, rows, rows))
    row = loaded.vocabulary * loaded.model.dtype.itemsize
    return sizing.graph_bytes(sizing.graph_sizes(rows), decode, row)


@torch.inference_mode()
def _run_largest_step(loaded: loader.Loaded, config: EngineConfig) -> None:
    """Compute a full chunk and a full batch, and draw a token for each of the batch."""
    rows = config.max_running
    logits = footprint.forward(loaded.model, config.prefill_chunk_tokens + rows, rows)
    logits.zero_()  # attention gave whatever was in memory, and no token is drawn of what is no number
    choosing.choose([_drawing() for _ in range(rows)], logits)


def _drawing() -> RowState:
    """Return the state of a request that takes most memory to draw for."""
    row = Row(Request("profile", [0], Sampling(1, temperature=1.0, top_p=0.9, top_k=50, seed=0)))
    no_tokenizer: Any = None
    return RowState(row, no_tokenizer, frozenset())
