"""Which models the fast engine may run. Whatever fails here runs in the fallback, which is right for all."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from worker.engine import (
    attention_flash,
    compiling,
    fused,
    interface,
    layer_trial,
    masks,
    packed,
    padding,
    parallel,
    parts,
    precision,
    runner,
)
from worker.engine.compiling import Compiler
from worker.engine.quantize.linear import IntLinear
from worker.engine.rows import RowState
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.types import EngineConfig, Request, Row, Sampling, Stats

log = logging.getLogger(__name__)
_LAYERS = {"full_attention", "sliding_attention", "attention"}
# The trial compares two ways to the same logits, in standard deviations of these. In float64, too, attention
# of transformers that is not torch's own takes its softmax in float32.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.2
_TRIAL_TOKENS = 24
_TRIAL_PAGES = 16


class Unsupported(Exception):
    """Why the fast engine cannot run a model."""


def prepare(
    model: Any, backend: str | runner.Backend = "auto", compiler: Compiler | None = None
) -> runner.ModelRunner:
    """Set a model's attention to ours and return its runner, tried; raises Unsupported, or
    attention_flash.Unavailable, with the model as it was. `compiler` None compiles nothing.
    """
    check_config(model)
    try:
        return _prepare(model, backend, compiler or Compiler())
    except Unsupported as reason:
        if backend != "auto" or model.device.type != "cuda":
            raise
        log.warning("tried again with torch's own attention", extra={"reason": str(reason)})
        ready = _prepare(model, "dense", compiler or Compiler())
        ready.no_flash = str(reason)
        return ready


def _prepare(model: Any, backend: str | runner.Backend, compiler: Compiler) -> runner.ModelRunner:
    before = model.config._attn_implementation
    try:
        expected = [_plain_logits(model, ids) for ids in _trial_prompts(model)]
        masks.check(model)
        model.set_attn_implementation(interface.NAME)
        ready = runner.ModelRunner(model, backend)
        if not _try_faster(ready, model, expected, compiler):
            _try(ready, model, expected)
    except (
        Exception
    ) as error:  # the code of a model may raise anything here; the fallback decides whether it runs
        model.set_attn_implementation(before)
        if isinstance(error, Unsupported | attention_flash.Unavailable):
            raise
        raise Unsupported(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    return ready


def _fuse_and_pack(model: Any, ready: runner.ModelRunner, compiler: Compiler) -> Iterator[packed.Replaced]:
    calls = layer_trial.listen(model) if precision.is_half(model.dtype) else None
    for replaced in fused.fuse_all(model, ready.scorings, compiler.pointwise()):
        yield replaced
        layer = replaced[2]
        if calls is not None:
            layer_trial.check(layer, ready.scorings[parts.index(layer)], calls)
        _spare(replaced)
    yield from _pack(model, ready, compiler)
    if compiler.on:
        for tokens in compiling.TOKENS:
            runner.dry_run(model, tokens)


def _pack(model: Any, ready: runner.ModelRunner, compiler: Compiler) -> Iterator[packed.Replaced]:
    for replaced in packed.pack_all(model):
        yield replaced
        _spare(replaced)


def _pack_integers(model: Any, ready: runner.ModelRunner, compiler: Compiler) -> Iterator[packed.Replaced]:
    for replaced in packed.pack_integers(model):
        yield replaced
        _spare(replaced)


def _ways(model: Any) -> tuple[Callable[..., Iterator[packed.Replaced]], ...]:
    """Return the ways to make a model faster, the fastest first."""
    if not parallel.is_share(model):
        return _fuse_and_pack, _pack
    # What other layers are replaced by knows nothing of the sums over a team.
    integers = any(isinstance(module, IntLinear) for module in model.modules())
    return (_pack_integers,) if integers else ()


def _try_faster(ready: runner.ModelRunner, model: Any, expected: list[Tensor], compiler: Compiler) -> bool:
    """Replace layers by fused ones and products by packed ones, as far as the logits stay what they were."""
    for replace in _ways(model):
        replaced: list[packed.Replaced] = []
        try:
            for each in replace(model, ready, compiler):
                replaced.append(each)
            if model.device.type == "cuda":
                torch.cuda.empty_cache()  # the weights that were merged: what is free is about to be measured
            _try(ready, model, expected)
            return True
        except Exception as error:  # what is replaced may not be what it looked like: then it stays as it was
            log.info(
                "the model's own code stays where it differs from faster code", extra={"reason": str(error)}
            )
            for parent, name, module in reversed(replaced):
                setattr(parent, name, module.to(model.device))
    return False


def _spare(replaced: packed.Replaced) -> None:
    """Have the host keep integers that were merged or tiled on a card, which else would hold those of all
    layers twice until all are tried.
    """
    for linear in _taken_over(replaced):
        if linear.weight.is_cuda:
            linear.to("cpu")


def _taken_over(replaced: packed.Replaced) -> list[IntLinear]:
    """Return the products of a module that what has replaced it has no use for."""
    parent, name, module = replaced
    kept = set(parent.get_submodule(name).modules())
    return [each for each in module.modules() if isinstance(each, IntLinear) and each not in kept]


def check_config(model: Any) -> None:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) | set(
        getattr(config, "layers_block_type", None) or ()
    )
    if not kinds <= _LAYERS:
        raise Unsupported(f"layers of kind {', '.join(sorted(kinds - _LAYERS))}")
    if getattr(model, "_is_stateful", False):
        raise Unsupported("the model carries a recurrent state")
    if model.config.is_encoder_decoder:
        raise Unsupported("the model has an encoder")
    if not model._can_set_attn_implementation():
        raise Unsupported("the model's attention cannot be replaced")
    if padding.rope_depends_on_length(model.config):
        raise Unsupported("the rotary embedding depends on the longest position in the batch")


def _trial_prompts(model: Any) -> list[list[int]]:
    """Return two prompts, the first half in common."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    half = [(7 * i + 3) % vocabulary for i in range(_TRIAL_TOKENS // 2)]
    return [half + [(step * i + 5) % vocabulary for i in range(_TRIAL_TOKENS // 2)] for step in (11, 13)]


@torch.inference_mode()
def _plain_logits(model: Any, ids: list[int]) -> Tensor:
    output = model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    return _comparable(output.logits[0, -1])


def _comparable(logits: Tensor) -> Tensor:
    """Return logits as precise as the model computed them, and no less than in float32."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _try(ready: runner.ModelRunner, model: Any, expected: list[Tensor]) -> None:
    """Compute the trial prompts in chunks, packed and with their prefix shared, and compare the logits."""
    stats, config = Stats(), EngineConfig(prefill_chunk_tokens=7)
    memory = ready.memory(ready.page_tokens * _TRIAL_PAGES * ready.layout.token_bytes)
    pack = ready.packer(memory, cascade=True)
    scheduler = Scheduler(memory, config, stats)
    rows = [Row(Request(str(i), ids, Sampling(1))) for i, ids in enumerate(_trial_prompts(model))]
    scheduler.add((row, RowState(row, None, frozenset())) for row in rows)  # type: ignore[arg-type]
    scheduler.admit(lambda rows: rows)
    found: dict[str, Tensor] = {}
    while len(found) < len(rows):
        batch = scheduler.next_batch()
        assert batch is not None
        step = pack(batch)
        logits = ready.step(step.step)
        if step.step.attention_calls != len(ready.layout.layers):
            raise Unsupported(f"{step.step.attention_calls} attention calls in a step")
        for end, row in zip(step.ends, _comparable(logits), strict=True):
            if isinstance(end, Sequence):
                found[end.row.id] = row
    for i, reference in enumerate(expected):
        gap, tolerance = _gap(found[str(i)], reference, model.dtype)
        if not gap <= tolerance:
            raise Unsupported(f"packed logits are off by {gap:.2g} standard deviations")


def _gap(found: Tensor, reference: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return how far logits [V] are from others, in standard deviations of these, and how far they may be.

    In half precision that is their mean distance: the farthest of many is far by chance.
    """
    gap = found - reference
    tolerance = _TOLERANCE.get(dtype)
    far = gap.square().mean().sqrt() if tolerance is None else gap.abs().max()
    return float(far / reference.std().clamp(min=1e-6)), tolerance or _HALF_TOLERANCE
