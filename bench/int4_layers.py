"""How far the outputs of each product are from those of the float32 model, by the inputs that has there."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from worker.engine.quantize.linear import IntLinear

_WINDOWS, _LENGTH = 4, 256


@torch.inference_mode()
def layer_error(full: Any, model: Any, ids: list[int]) -> dict[str, float]:
    """Return ||Wx - W'x|| / ||Wx|| over the products that are quantised in `model`: mean and greatest.

    `full` is the same model without, which runs over windows spread evenly over a text.
    """
    sums: dict[str, tuple[float, float]] = {}
    room = max(0, len(ids) - _LENGTH)
    with _watched(full, model, sums):
        for start in sorted({room * i // _WINDOWS for i in range(_WINDOWS)}):
            full.base_model(input_ids=torch.tensor([ids[start : start + _LENGTH]]), use_cache=False)
    errors = [math.sqrt(wrong / whole) for wrong, whole in sums.values()]
    return {"mean": round(sum(errors) / len(errors), 5), "greatest": round(max(errors), 5)}


@contextmanager
def _watched(full: Any, model: Any, sums: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Have each product of `full` also computed as `model` does, and squares of both summed by name."""
    quantised = {name: each for name, each in model.named_modules() if isinstance(each, IntLinear)}
    # A head may be rounded, too; `layer_error` does not run it.
    heads = {id(model.get_output_embeddings())}
    hooks = [
        full.get_submodule(name).register_forward_hook(_adds_to(sums, name, each))
        for name, each in quantised.items()
        if id(each) not in heads
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _adds_to(
    sums: dict[str, tuple[float, float]], name: str, linear: IntLinear
) -> Callable[[Any, tuple[Tensor, ...], Tensor], None]:
    def add(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        wrong, whole = sums.get(name, (0.0, 0.0))
        right = output if linear.bias is None else output - linear.bias
        gap = linear(inputs[0]) - output
        sums[name] = wrong + _square(gap), whole + _square(right)

    return add


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())
