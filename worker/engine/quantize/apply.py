"""All products of a model quantised, one full weight in memory at a time."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine import parallel
from worker.engine.quantize import calibrate, hollow, rounding, shares
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.recipe import Recipe, fitting_group
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import GroupedWeight

log = logging.getLogger(__name__)
Progress = Callable[[int, int], object]
"""Told how many products are done, of how many."""


def fill(model: Any, weights: dict[str, GroupedWeight]) -> None:
    """Give products of a model quantised weights, by name."""
    for name, grouped in weights.items():
        if parallel.is_share(model):
            shares.put(model, name, grouped)
        else:
            _replace(model, name, grouped)


@torch.inference_mode()
def round_head(model: Any) -> None:
    """Round the weight of a model's head to 8 bits; embeddings that share it keep theirs.

    A rank of a team rounds the rows that it has: each has groups of its own.
    """
    head = model.get_output_embeddings()
    group = fitting_group(head.weight.shape[1]) if type(head) is nn.Linear else None
    if group is None:
        log.warning("the head stays as it is: %s", type(head).__name__)
        return
    name = next(name for name, module in model.named_modules() if module is head)
    rows = rounding.nearest(shares.local(head.weight), 8, group)
    if parallel.is_share(model):
        shares.put_rows(model, name, rows, head.weight.shape[0])
    else:
        _replace(model, name, rows)


def choose(recipe: Recipe) -> hollow.Choose:
    """Return what tells which products' weights need not be loaded: those that can be read one by one."""

    def those(tensors: Tensors, model: nn.Module) -> set[str]:
        return {
            name
            for name, linear in hollow.products(model).items()
            if f"{name}.weight" in tensors
            and tensors.shape(f"{name}.weight") == tuple(linear.weight.shape)
            and recipe.group_of(linear.in_features)
        }

    return those


@torch.inference_mode()
def quantize(
    model: Any,
    tensors: Tensors,
    recipe: Recipe,
    ids: Tensor | None,
    progress: Progress = lambda *_: None,
    in_place: bool = True,
) -> dict[str, GroupedWeight]:
    """Quantise the products of a model in their places; return their weights by name.

    With token ids [sequences, tokens] each product is quantised when the forward over them first gets to it,
    by what goes into it: what quantised products before it have made. What it does not get to is rounded.
    Not `in_place`, weights go to the host one by one, and the model is of no more use.
    """
    run = _Run(model, tensors, recipe, progress, in_place)
    if ids is not None:
        run.wait_for_inputs()
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
    for name in run.names:
        if name not in run.done:
            run.make(name, None)
    return run.done


class _Run:
    def __init__(
        self, model: Any, tensors: Tensors, recipe: Recipe, progress: Progress, in_place: bool
    ) -> None:
        self._model, self._tensors, self._recipe, self._progress = model, tensors, recipe, progress
        self._in_place = in_place
        self.done: dict[str, GroupedWeight] = {}
        found = hollow.products(model)
        self.names = [name for name, linear in found.items() if recipe.group_of(linear.in_features)]
        self._last: tuple[Tensor, calibrate.Inputs] | None = None
        if kept := len(found) - len(self.names):
            log.warning("%d products stay as they are: no group divides their inputs", kept)
        if whole := sum(type(found[name]) is nn.Linear for name in self.names):
            log.info("%d products were loaded whole before they are quantised", whole)

    def wait_for_inputs(self) -> None:
        for name in self.names:
            hollow.put(self._model, name, _Pending(self, name, self._model.get_submodule(name)))

    def make(self, name: str, x: Tensor | None) -> IntLinear:
        """Quantise a product by what goes into it, if that is known."""
        linear = self._model.get_submodule(name)
        group = self._recipe.group_of(linear.in_features)
        assert group is not None
        weight = self._weight(name, linear)
        if x is None:
            grouped = rounding.nearest(weight, self._recipe.bits, group)
        elif self._recipe.method == "sampled":
            grouped = rounding.searched(weight, self._inputs(x).importance, self._recipe.bits, group)
        else:
            grouped = calibrate.calibrated(weight, self._inputs(x), self._recipe.bits, group)
        self.done[name] = grouped if self._in_place else grouped.to(torch.device("cpu"))
        self._progress(len(self.done), len(self.names))
        return _replace(self._model, name, grouped) if self._in_place else self.again(name)

    def again(self, name: str) -> IntLinear:
        """Return a product that is quantised, but not in its place."""
        return _product(self._model, self.done[name], self._model.get_submodule(name).bias)

    def _weight(self, name: str, linear: Any) -> Tensor:
        whole = getattr(linear, "weight", None)
        return self._tensors.read(f"{name}.weight").to(self._model.device) if whole is None else whole.data

    def _inputs(self, x: Tensor) -> calibrate.Inputs:
        """Return what is known of an input; queries, keys and values have the same."""
        if self._last is None or self._last[0] is not x:
            self._last = x, calibrate.Inputs(x)
        return self._last[1]


class _Pending(nn.Module):
    """A product that is quantised when its input comes, and then is an IntLinear."""

    def __init__(self, run: _Run, name: str, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self._run, self._name = linear.bias, run, name
        self.weight = getattr(linear, "weight", None)

    def forward(self, x: Tensor) -> Tensor:
        if self._name in self._run.done:  # it is called again, and was not put in its place
            return self._run.again(self._name)(x)
        # Without rows (an expert that no token goes to) there is nothing to go by.
        return self._run.make(self._name, x if x.numel() else None)(x)


def _replace(model: Any, name: str, grouped: GroupedWeight) -> IntLinear:
    made = _product(model, grouped, model.get_submodule(name).bias)
    hollow.put(model, name, made)
    return made


def _product(model: Any, grouped: GroupedWeight, bias: Tensor | None) -> IntLinear:
    return IntLinear(grouped.to(model.device), None if bias is None else bias.data, model.dtype)
