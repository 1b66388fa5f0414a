"""What a model takes, learnt on torch's meta device: its code runs, and nothing is loaded or computed."""

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig

from jobs import errors, tokens
from worker.engine import guards, heads, interface, kv, runner
from worker.engine.attention import Heads
from worker.engine.quantize import linear as int_linear
from worker.engine.quantize import planning, tiles
from worker.engine.quantize.planning import Kept
from worker.engine.quantize.weights import Bits, GroupedWeight
from worker.engine.source import locate
from worker.engine.types import EngineConfig

_DRAW_COPIES = 4
"""The copies of the logits in float64 that a draw holds at once."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that one card needs for a model, of which it has a share in `tensor_parallel`.

    `step_bytes` is what the largest step holds besides weights and KV, `decode_bytes` the same of a step that
    only decodes, without the choice of tokens. `products` are the elements of weights that are multiplied
    with, the head's apart in `head`; `quantized` names the bits that some of them are kept at. `attention` is
    heads x (key size + value size), summed over layers.
    """

    name: str
    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    products: int
    head: int
    attention: int
    layout: kv.Layout
    step_bytes: int
    decode_bytes: int
    vocabulary: int
    context_tokens: int
    tensor_parallel: int = 1
    quantized: str = ""

    @property
    def token_bytes(self) -> int:
        """KV of one token."""
        return self.layout.token_bytes // self.tensor_parallel


def of_source(source: str, config: EngineConfig, dtype: torch.dtype | None, parallel: int = 1) -> Footprint:
    """Read a model's config and return what it needs; `dtype` None takes the model's own, if it is half
    precision, else bfloat16. Raises errors.ModelUnavailable.
    """
    try:
        location, options = locate(source, config)
        own = AutoConfig.from_pretrained(location, **options)
        halves = (torch.bfloat16, torch.float16)
        picked = dtype or (own.dtype if own.dtype in halves else torch.bfloat16)
        auto = heads.auto_class(own, options, "generate")
        # Products of experts run in bfloat16 alone on the meta device.
        with torch.device("meta"):
            model = auto.from_config(own, dtype=torch.bfloat16, trust_remote_code=config.trust_remote_code)
        gguf = Path(location, options["gguf_file"]) if "gguf_file" in options else None
        files = sorted(Path(location).glob("*.safetensors"))
        kept = planning.kept(model, own, config, files, gguf)
        return of_model(model.eval(), config, parallel, picked, kept)
    except Exception as error:  # a model's own code and files may raise anything
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise errors.ModelUnavailable(name=source, source=source, reason=reason) from error


def of_model(
    model: Any,
    config: EngineConfig,
    parallel: int = 1,
    dtype: torch.dtype | None = None,
    kept: Mapping[str, Kept] | None = None,
) -> Footprint:
    """Return what a model on the meta device needs in a dtype (None: its own) at least as wide as its own,
    with some products `kept` as integers; raises ValueError or guards.Unsupported with the reason why the
    fast engine does not run it.
    """
    guards.check_config(model)
    model.set_attn_implementation(interface.NAME)
    layout = runner.ModelRunner(model).layout
    wider = (dtype or model.dtype).itemsize // model.dtype.itemsize
    if any(layer_heads % parallel for layer_heads, _, _ in layout.layers):
        counts = sorted({layer_heads for layer_heads, _, _ in layout.layers})
        raise ValueError(f"{', '.join(map(str, counts))} KV heads cannot be divided among {parallel} cards")
    heads_of_layers = _Attention()
    rows, vocabulary = config.max_running, model.get_output_embeddings().weight.shape[0]
    step = peak_bytes(lambda: _forward(model, heads_of_layers, config.prefill_chunk_tokens + rows, rows))
    drawing = rows * vocabulary * torch.float64.itemsize * _DRAW_COPIES
    products = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)}
    head = products.pop(id(model.get_output_embeddings().weight))
    kept = kept or {}
    whole = _dequantized_bytes(model, kept, dtype or model.dtype) // parallel
    return Footprint(
        type(model).__name__,
        dtype or model.dtype,
        sum(p.numel() for p in model.parameters()),
        _weight_bytes(model, parallel, wider, kept),
        sum(products.values()),
        head,
        sum(heads_of_layers.sizes.values()),
        dataclasses.replace(layout, dtype=dtype or model.dtype),
        max(wider * step + whole, drawing),
        wider * peak_bytes(lambda: forward(model, rows, rows)) + whole,
        vocabulary,
        config.context_tokens or tokens.context_of(model.config, None),
        parallel,
        ", ".join(f"int{bits}" for bits in sorted({each.bits for each in kept.values()})),
    )


def peak_bytes(run: Callable[[], object]) -> int:
    """Return how many bytes of tensors made by `run` are held at once at most, whatever their device."""
    with _Live() as live:
        run()
    return live.peak


class _Live(TorchDispatchMode):
    """Counts storages from the operation that makes them to their end."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: Any) -> None:
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._end, size)

    def _end(self, size: int) -> None:
        self.now -= size


class _Attention:
    """Attention of the right shape; notes heads x (key size + value size) of each layer."""

    decode = None

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def __call__(self, heads: Heads, /) -> Tensor:
        q, v = heads.queries, heads.values
        self.sizes[heads.layer] = q.shape[1] * (q.shape[2] + v.shape[2])
        return q.new_empty(*q.shape[:2], v.shape[2])


def forward(model: Any, tokens: int, wanted: int) -> Tensor:
    """Run all of a model but its attention on so many tokens; return logits [wanted, V] of no meaning."""
    return _forward(model, _Attention(), tokens, wanted)


@torch.inference_mode()
def _forward(model: Any, attention: _Attention, count: int, wanted: int) -> Tensor:
    ids = torch.zeros(1, count, dtype=torch.long, device=model.device)
    with interface.handling(attention):
        output = model(
            input_ids=ids,
            position_ids=torch.arange(count, device=model.device)[None],
            use_cache=False,
            logits_to_keep=torch.arange(wanted, device=model.device),
        )
    logits: Tensor = output.logits[0]
    return logits


def _weight_bytes(model: Any, parallel: int, wider: int, kept: Mapping[str, Kept]) -> int:
    """Return the bytes of parameters and buffers, each once; of what is divided among cards, a part.

    Numbers take `wider` times what they take in the model.
    """
    plan = getattr(model, "tp_plan", None) or {}
    if parallel > 1 and not plan:
        raise ValueError("transformers has no plan to divide it among cards")
    own = dict(model.named_parameters())
    sizes = {name if name in own else f"{name}.weight": each.nbytes for name, each in kept.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        sizes.setdefault(name, wider * tensor.nbytes)
    return sum(_part(plan, name, size, parallel) for name, size in sizes.items())


def _part(plan: Mapping[str, str], name: str, size: int, parallel: int) -> int:
    general = re.sub(r"\.\d+\.", ".*.", name)
    style = plan.get(general) or plan.get(general.rpartition(".")[0]) or "replicated"
    return size if style.startswith("replicated") else -(-size // parallel)


def _dequantized_bytes(model: Any, kept: Mapping[str, Kept], dtype: torch.dtype) -> int:
    """Return what the largest product holds while its integers become numbers, as it does in large steps."""
    found, own = 0, dict(model.named_parameters())
    for name, each in kept.items():
        if name in own:
            numbers = own[name][0].numel()  # one expert after another
        else:
            linear = model.get_submodule(name)
            # The two of a gated MLP are one product. The head has no other beside it.
            merged = 1 if linear is model.get_output_embeddings() else 2
            numbers = merged * linear.out_features * linear.in_features
        if not _in_tiles(each.bits, dtype):
            numbers = min(numbers, int_linear.AT_A_TIME)
        found = max(found, numbers * _number_bytes(each.bits, dtype))
    return found


def _in_tiles(bits: Bits, dtype: torch.dtype) -> bool:
    return bits == 4 and dtype == torch.bfloat16


@functools.cache
def _number_bytes(bits: Bits, dtype: torch.dtype) -> int:
    """Return the bytes held for each number of a weight that is dequantised, by doing so."""
    count = 256
    # Not on the meta device, where some operations are made of several that hold more.
    packed, scales = torch.zeros(count, count * bits // 8, dtype=torch.uint8), torch.zeros(count, count // 64)
    weight = GroupedWeight(packed, scales.half(), scales.half(), 64, bits, minimum=True)
    if _in_tiles(bits, dtype):
        pairs = tiles.scales_and_zeros(weight)
        peak = peak_bytes(lambda: tiles.dequantized(weight.integers(), pairs, weight.group))
    else:
        peak = peak_bytes(lambda: weight.dequantized(dtype))
    return round(peak / count**2)
