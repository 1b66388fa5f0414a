"""One forward of the model over a packed step."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.engine import attention, attention_flash, graphs, interface, kv, packing, pages, paging
from worker.engine import device as devices
from worker.engine.attention_flash import FlashAttention
from worker.engine.native import library
from worker.engine.native.attention import NativeAttention
from worker.engine.paged_step import PagedStep
from worker.engine.scheduler import Batch
from worker.engine.step import Step

log = logging.getLogger(__name__)
Memory = kv.Memory | pages.Memory
AnyStep = Step | PagedStep
Backend = attention.Backend | FlashAttention


class Runner(Protocol):
    """What the engine needs of a model: where its KV goes, and the logits of a step."""

    layout: kv.Layout
    device: devices.Device
    reads_beyond: bool
    """Whether it reads KV that is not written yet, with a weight of 0."""

    def memory(self, budget: int) -> Memory:
        """Return so many bytes of memory of the kind that its steps are over."""
        ...

    def packer(self, memory: Memory, cascade: bool) -> Callable[[Batch], packing.Packed]:
        """Return what makes its steps."""
        ...

    def record(self, limits: graphs.Limits | None) -> graphs.Counts:
        """Record decode steps from now on, if it can, within limits; return what counts them. None: do not,
        and drop those that are.
        """
        ...

    def step(self, step: Any) -> Tensor:
        """Compute a step; return the logits [R, V] of its wanted tokens, which the next step may overwrite.
        What is launched before that reads the right ones.
        """
        ...


class StorageRunner:
    """The part of a Runner whose steps are over storages."""

    layout: kv.Layout
    device: devices.Device = devices.Host()
    reads_beyond: bool

    def memory(self, budget: int) -> Memory:
        return kv.Memory(self.layout, budget, self.reads_beyond)

    def packer(self, memory: Memory, cascade: bool) -> Callable[[Batch], packing.Packed]:
        return lambda batch: packing.pack(batch, self.layout.device, cascade)

    def record(self, limits: graphs.Limits | None) -> graphs.Counts:
        return graphs.Counts()


class ModelRunner(StorageRunner):
    """Runs a transformers model whose attention has been set to ours. Raises NotImplementedError if it has
    none, attention_flash.Unavailable if it is to be `flash` and cannot.

    `backend` is one, or its name; auto is flash-attn on a GPU that can, our kernels on a CPU where they are
    compiled, else dense, for which `no_flash` says why.
    """

    def __init__(self, model: Any, backend: str | Backend = "auto") -> None:
        self._model = model
        self.layout, self.scorings = _learn_layers(model)
        self.device = devices.of(self.layout.device)
        self.no_flash: str | None = None
        self._graphs: graphs.Graphs | None = None
        self._backend = self._named(backend) if isinstance(backend, str) else backend
        if isinstance(self._backend, FlashAttention):
            fault = attention_flash.shape_fault(self.layout, self.scorings)
            if fault is not None:
                raise NotImplementedError(f"flash-attn does not have {fault}")
        self.reads_beyond = not isinstance(self._backend, NativeAttention)

    def _named(self, name: str) -> Backend:
        if name == "flash" or (name == "auto" and self.layout.device.type == "cuda"):
            self.no_flash = attention_flash.why_not(self.layout, self.scorings)
            if self.no_flash is None:
                return FlashAttention(attention_flash.load())
            if name == "flash":
                raise attention_flash.Unavailable(self.no_flash)
            log.warning("torch's own attention on %s, without pages: %s", self.layout.device, self.no_flash)
        if name != "auto":
            return attention.BACKENDS[name]
        kernels = library.kernels(self.layout.dtype, self.layout.device)
        return attention.dense if kernels is None else NativeAttention(kernels)

    @property
    def paged(self) -> bool:
        return isinstance(self._backend, FlashAttention)

    @property
    def page_tokens(self) -> int:
        """How many tokens its memory is given out by, at least."""
        return self._backend.page_tokens if isinstance(self._backend, FlashAttention) else 32

    def memory(self, budget: int) -> Memory:
        if isinstance(self._backend, FlashAttention):
            return pages.Memory(self.layout, budget, self._backend.page_tokens)
        return super().memory(budget)

    def packer(self, memory: Memory, cascade: bool) -> Callable[[Batch], packing.Packed]:
        if not isinstance(memory, pages.Memory):
            return super().packer(memory, cascade)
        windows = any(scoring.window is not None for scoring in self.scorings)
        return paging.Packer(memory, self.device.stage, windows, cascade).pack

    def record(self, limits: graphs.Limits | None) -> graphs.Counts:
        self._graphs = None
        if limits is not None and isinstance(self._backend, FlashAttention) and self.device.ahead:
            self._graphs = graphs.Graphs(self.device, self._compute, limits)
        return graphs.Counts() if self._graphs is None else self._graphs.counts

    def step(self, step: AnyStep) -> Tensor:
        if not isinstance(step, PagedStep):
            return self._compute(step)
        logits = None if self._graphs is None else self._graphs.run(step)
        if logits is not None:
            return logits
        if step.copies is not None:
            step.pool.copy(*step.copies)
        return self._compute(step)

    def _compute(self, step: AnyStep) -> Tensor:
        return _forward(self._model, _Stepping(self._backend, step), step.ids, step.positions, step.wanted)


class _Stepping:
    """Handles the attention of one step; counts it."""

    def __init__(self, backend: Any, step: AnyStep) -> None:
        self._backend = backend
        self._step = step
        self.decode = self._decode if isinstance(backend, NativeAttention) else None

    def __call__(self, heads: attention.Heads, /) -> Tensor:
        self._step.attention_calls += 1
        result: Tensor = self._backend(self._step, heads)
        return result

    def _decode(self, *tensors: Any) -> None:
        assert isinstance(self._backend, NativeAttention)
        assert isinstance(self._step, Step)
        self._step.attention_calls += 1
        self._backend.decode(self._step, *tensors)


class _Learning:
    """Notes what each layer's keys and values look like and how it scores them."""

    decode = None

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.scorings: dict[int, attention.Scoring] = {}

    def __call__(self, heads: attention.Heads, /) -> Tensor:
        layer, k, v = heads.layer, heads.keys, heads.values
        if layer in self.shapes:
            raise NotImplementedError(f"layer {layer} calls attention more than once")
        self.scorings[layer] = heads.scoring
        self.shapes[layer] = (k.shape[1], k.shape[2], v.shape[2])
        return v.repeat_interleave(heads.queries.shape[1] // v.shape[1], 1)


@torch.inference_mode()
def _forward(
    model: Any, handler: interface.Handler, ids: Tensor, positions: Tensor, wanted: Tensor
) -> Tensor:
    with interface.handling(handler):
        output = model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted
        )
    return output.logits[0]


def dry_run(model: Any, tokens: int) -> _Learning:
    """Run all of a model but its attention, on so many tokens."""
    learning, positions = _Learning(), torch.arange(tokens, device=model.device)
    _forward(model, learning, positions, positions, positions[-1:])
    return learning


def _learn_layers(model: Any) -> tuple[kv.Layout, list[attention.Scoring]]:
    """Run two tokens to see how each layer attends."""
    learning = dry_run(model, 2)
    layers = model.config.get_text_config().num_hidden_layers
    shapes, scorings = learning.shapes, learning.scorings
    if sorted(shapes) != list(range(layers)):
        raise NotImplementedError(f"{len(shapes)} of {layers} layers call the attention interface")
    layout = kv.Layout(tuple(shapes[layer] for layer in range(layers)), model.dtype, model.device)
    return layout, [scorings[layer] for layer in range(layers)]
