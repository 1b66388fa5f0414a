"""Decode steps that are recorded once and repeated: the host launches one graph in place of every kernel.

Recorded are, and no later step changes: the kernels and their grids; where the pages, the weights, the inputs
and the logits lie; the sizes of a Shape, and with them `most_queries` (1, and of shared rows the padded batch
size) and `most_keys` (all of a table's pages), which are therefore bounds and not counts; that row i of the
decode has query i; that nothing is prefilled; every number and every branch that the forward takes from
Python. Everything else is read from tensors when it repeats.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine import device_errors, pages
from worker.engine.device import Device
from worker.engine.graph_inputs import Inputs
from worker.engine.graph_shapes import Shape
from worker.engine.paged_step import PagedStep

log = logging.getLogger(__name__)
_MOST_FAILURES = 2
"""A forward that cannot be recorded cannot in other sizes either, and each attempt stops all work."""
_STALE_STEPS = 1000
Forward = Callable[[PagedStep], Tensor]


@dataclass(frozen=True)
class Limits:
    """How many graphs there may be, and how many bytes they may hold together."""

    graphs: int
    bytes: int


@dataclass
class Counts:
    captured: int = 0
    replayed: int = 0
    eager_decodes: int = 0
    """Decode steps that no graph runs."""
    refused: int = 0
    """Shapes that there is no graph of: one too many, too large, or its recording failed."""
    padding_rows: int = 0
    bytes: int = 0


class Graphs:
    """Runs decode steps by graphs, each recorded when the first step of its shape comes.

    `forward(step)` computes the logits [R, V] of a step. It must not let through what it computes for queries
    that no shared row has, those from the last of `shared.rows.starts` on; `copies` are done before it.
    """

    def __init__(self, device: Device, forward: Forward, limits: Limits) -> None:
        self.counts = Counts()
        self._device = device
        self._forward = forward
        self._limits = limits
        self._graphs: OrderedDict[Shape, _Graph] = OrderedDict()
        self._refused: set[Shape] = set()
        self._impossible: set[Shape] = set()
        self._failures = 0

    @torch.inference_mode()
    def run(self, step: PagedStep) -> Tensor | None:
        """Return the logits [R, V] of a decode step; None if the caller is to compute it without a graph.

        They are a view of memory that the next step of the same shape overwrites. What is launched before
        that step reads the right values; who needs them later takes a copy.
        """
        shape = Shape.of(step)
        if shape is None:
            return None
        graph = self._graphs.get(shape) or self._recorded(shape, step.pool)
        if graph is None:
            self.counts.eager_decodes += 1
            return None
        self.counts.replayed += 1
        graph.used = self._now()
        self._graphs.move_to_end(shape)
        self.counts.padding_rows += shape.rows - len(step.ids)
        return graph.replay(step)

    def clear(self) -> None:
        """Drop all graphs, to record them anew, and give their memory back."""
        self._graphs.clear()
        self._refused.clear()
        self._impossible.clear()
        self._failures = self.counts.bytes = 0

    def _now(self) -> int:
        return self.counts.replayed + self.counts.eager_decodes

    def _recorded(self, shape: Shape, pool: pages.Pool) -> "_Graph | None":
        if shape in self._impossible or self._failures >= _MOST_FAILURES:
            return None
        while len(self._graphs) >= self._limits.graphs or self.counts.bytes >= self._limits.bytes:
            if not self._drop_stale():
                self._refuse(shape, f"{len(self._graphs)} graphs hold {self.counts.bytes} bytes")
                return None
        try:
            before = self._device.free_bytes()
            graph = _Graph(self._device, self._forward, shape, pool)
            graph.bytes = max(0, before - self._device.free_bytes())
        except Exception as error:  # whatever keeps it from being recorded, it can be computed
            if device_errors.is_lost(error):
                raise
            self._failures += 1
            self._impossible.add(shape)
            self._refuse(shape, f"{type(error).__name__}: {error}")
            return None
        if self.counts.bytes + graph.bytes > self._limits.bytes:
            self._impossible.add(shape)
            self._refuse(shape, f"it takes {graph.bytes} bytes, others {self.counts.bytes}")
            return None
        self.counts.bytes += graph.bytes
        self.counts.captured += 1
        self._graphs[shape] = graph
        return graph

    def _drop_stale(self) -> bool:
        """Drop the graph that was used longest ago, if that is long; False if it is not. Else, where steps
        have more shapes than there may be graphs, each would be recorded again and again.
        """
        shape, graph = next(iter(self._graphs.items()), (None, None))
        if shape is None or graph is None or self._now() - graph.used < _STALE_STEPS:
            return False
        del self._graphs[shape]
        self.counts.bytes -= graph.bytes
        return True

    def _refuse(self, shape: Shape, reason: str) -> None:
        if shape not in self._refused:
            self._refused.add(shape)
            self.counts.refused += 1
            log.warning(
                "decode steps run without a graph", extra={"shape": shape, "reason": reason.split("\n")[0]}
            )


class _Graph:
    """A recorded step and its inputs. It is recorded while these are padding, so that a value which is
    wrongly recorded is wrong for every step.
    """

    def __init__(self, device: Device, forward: Forward, shape: Shape, pool: pages.Pool) -> None:
        self.bytes = self.used = 0
        self._inputs = Inputs(device.stage, shape, pool)
        self._pool = pool
        step = self._inputs.step

        def run() -> Tensor:
            step.attention_calls = 0
            return forward(step)

        self._repeat, self._logits = device.record(run)
        self._attention_calls = step.attention_calls

    def replay(self, step: PagedStep) -> Tensor:
        if step.pool is not self._pool:
            raise ValueError("a graph was recorded with the pages of another pool")
        if step.copies is not None:
            self._pool.copy(*step.copies)
        self._inputs.fill(step)
        self._repeat()
        step.attention_calls += self._attention_calls
        return self._logits[: len(step.wanted)]
