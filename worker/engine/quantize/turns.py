"""Products quantised when their turn comes: when their input does, or when all inputs have come."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine.quantize import calibrate, experts, filling, hollow, int_experts, mixing, rounding
from worker.engine.quantize.linear import IntLinear
from worker.engine.quantize.recipe import GROUPS, Recipe
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.weights import GroupedWeight

log = logging.getLogger(__name__)
Progress = Callable[[int, int], object]
"""Told how many products are done, of how many."""
_FEWEST_ROWS = 32
"""What goes into an expert says little when it is less than this; then all rows speak for it."""


def fitting(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Return the products of a model that a group divides, of experts both or none."""
    found = hollow.products(model)
    odd = {name for name, each in found.items() if not recipe.group_of(each.in_features)}
    owners = {found[name].owner for name in odd if isinstance(found[name], experts.Part)}
    return {
        name: each
        for name, each in found.items()
        if name not in odd and getattr(each, "owner", None) not in owners
    }


def require_fitting(model: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """Return the same; raises ValueError if there are none: what is not quantised is not called so."""
    found = fitting(model, recipe)
    if not found:
        raise ValueError(
            f"none of its products can be quantised: they are no linear layers, or groups of {GROUPS[-1]}"
            " do not divide their inputs"
        )
    return found


class Turns:
    """The products of a model, to be quantised in their places; `done` has their weights by name."""

    def __init__(
        self, model: Any, tensors: Tensors, recipe: Recipe, progress: Progress, in_place: bool = True
    ) -> None:
        self._model, self._tensors, self._recipe, self._progress = model, tensors, recipe, progress
        self._in_place = in_place
        self.done: dict[str, GroupedWeight] = {}
        self._names = fitting(model, recipe)
        self._modules = dict.fromkeys(getattr(each, "owner", name) for name, each in self._names.items())
        self._last: tuple[Tensor, calibrate.Inputs] | None = None
        self._say_what_stays()

    def _say_what_stays(self) -> None:
        if kept := len(hollow.products(self._model)) - len(self._names):
            log.warning("%d products stay as they are: no group divides their inputs", kept)
        if others := experts.others(self._model):
            log.warning("%d weights of three dimensions stay as they are, as %s", len(others), others[0])
        if whole := self._modules.keys() - hollow.empty(self._model).keys():
            log.info("the products of %d modules were loaded whole before they are quantised", len(whole))

    def wait_for_inputs(self) -> None:
        for name in self._modules:
            module = self._model.get_submodule(name)
            pending = _Pending if hasattr(module, "in_features") else _PendingExperts
            hollow.put(self._model, name, pending(self, name, module))

    def finish(self) -> None:
        """Round what no input has come to."""
        for name in self._modules:
            module = self._model.get_submodule(name)
            if isinstance(module, _PendingExperts):
                module = module.own
            if name in self.done or isinstance(module, int_experts.IntExperts):
                continue
            if hasattr(module, "in_features"):
                self.make(name, None)
            else:
                self.make_experts(name, module, None, None)

    def make(self, name: str, x: Tensor | None) -> IntLinear:
        """Quantise a product by what goes into it, if that is known."""
        linear = self._model.get_submodule(name)
        inputs = None if x is None else self._inputs(x)
        self._keep(name, self._rounded(self._weight(name, linear), inputs))
        return filling.replace(self._model, name, self.done[name]) if self._in_place else self.again(name)

    def again(self, name: str) -> IntLinear:
        """Return a product that is quantised, but not in its place."""
        return filling.product(self._model, self.done[name], self._model.get_submodule(name).bias)

    def make_experts(
        self, name: str, module: Any, hidden: Tensor | None, index: Tensor | None
    ) -> int_experts.IntExperts:
        """Quantise experts, each by its rows of hidden [tokens, inputs] by index [tokens, chosen]."""
        hollow.put(self._model, name, module)
        up, down = (
            experts.read(module, parameter, self._tensors, self._model)
            for parameter in mixing.parameters(module)
        )
        given = [None] * len(up) if hidden is None or index is None else rows(hidden, index, len(up))
        for number, x in enumerate(given):
            first, second = (f"{name}.{number}.{parameter}" for parameter in mixing.parameters(module))
            self._keep(first, self._rounded(up[number], None if x is None else calibrate.Inputs(x)))
            if x is not None:
                x = mixing.between(module, self._first(module, number, first)(x))
            self._keep(second, self._rounded(down[number], None if x is None else calibrate.Inputs(x)))
        return filling.fill_experts(self._model, name, self.done)

    def _first(self, module: Any, number: int, name: str) -> IntLinear:
        bias = experts.bias(module, mixing.parameters(module)[0], number)
        return IntLinear(self.done[name], bias, self._model.dtype)

    def _rounded(self, weight: Tensor, inputs: calibrate.Inputs | None) -> GroupedWeight:
        bits, group = self._recipe.bits, self._recipe.group_of(weight.shape[1])
        assert group is not None
        if inputs is None:
            return rounding.nearest(weight, bits, group)
        if self._recipe.method == "sampled":
            return rounding.searched(weight, inputs.importance, bits, group)
        return calibrate.calibrated(weight, inputs, bits, group)

    def _keep(self, name: str, weight: GroupedWeight) -> None:
        rounding.refuse_infinite(name, weight)
        self.done[name] = weight if self._in_place else weight.to(torch.device("cpu"))
        self._progress(len(self.done), len(self._names))

    def _weight(self, name: str, linear: Any) -> Tensor:
        if linear.weight.numel():
            return linear.weight.data
        return hollow.read(self._tensors, name, linear).to(self._model.device)

    def _inputs(self, x: Tensor) -> calibrate.Inputs:
        """Return what is known of an input; queries, keys and values have the same."""
        if self._last is None or self._last[0] is not x:
            self._last = x, calibrate.Inputs(x)
        return self._last[1]


def rows(hidden: Tensor, index: Tensor, count: int) -> list[Tensor | None]:
    """Return the rows that go into each expert, or of those that few go into all rows."""
    places = mixing.rows_of(index, count)
    few = min(_FEWEST_ROWS, len(hidden))
    return [hidden[each // index.shape[-1]] if len(each) >= few else hidden for each in places]


class _Pending(nn.Module):
    """A product that is quantised when its input comes, and then is an IntLinear."""

    def __init__(self, run: Turns, name: str, linear: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self._run, self._name = linear.bias, run, name
        self.transposed = hollow.is_transposed(linear)
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        if self._name in self._run.done:  # it is called again, and was not put in its place
            return self._run.again(self._name)(x)
        # Without rows (an expert that no token goes to) there is nothing to go by.
        return self._run.make(self._name, x if x.numel() else None)(x)


class _PendingExperts(nn.Module):
    """The same of a mixture's experts."""

    def __init__(self, run: Turns, name: str, module: Any) -> None:
        super().__init__()
        self.own, self._run, self._name = module, run, name

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        made = self._run.make_experts(self._name, self.own, hidden_states, top_k_index)
        found: Tensor = made(hidden_states, top_k_index, top_k_weights)
        return found
