"""The experts of a mixture, whose weights transformers keeps in two parameters, as many linear layers.

Taken are those that follow transformers' interface of experts (`use_experts_implementation`), which has them
say how their weights lie and what is computed between them, where trying it shows that it is so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine import parallel
from worker.engine.quantize import describing, mixing
from worker.engine.quantize.merging import Source
from worker.engine.quantize.tensors import Tensors


@dataclass(frozen=True)
class Part:
    """One weight [outputs, inputs] of one expert."""

    owner: str
    number: int
    parameter: str
    out_features: int
    in_features: int
    siblings: tuple[str, str]

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.number}.{self.parameter}"

    @property
    def together(self) -> list[str]:
        """The names of the model's parameters that are read when this is."""
        return [f"{self.owner}.{parameter}" for parameter in self.siblings]


def weight_of(name: str) -> tuple[str, str]:
    """Return the module and the parameter that the part of a name belongs to."""
    whole, _, parameter = name.rpartition(".")
    return whole.rpartition(".")[0], parameter


def owner_of(model: nn.Module, name: str) -> str | None:
    """Return the module of experts that a product of a model is part of, if it is."""
    owner = weight_of(name)[0]
    return owner if _is_taken(model.get_submodule(owner)) else None


def modules(model: nn.Module) -> dict[str, Any]:
    """Return the modules of experts whose weights are there or still on disk, by name."""
    return {name: each for name, each in model.named_modules() if _is_taken(each)}


def others(model: nn.Module) -> list[str]:
    """Return the names of weights of three dimensions, as experts have, that nothing is known of."""
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if not _is_taken(module) and not isinstance(module, nn.Conv1d)
        for parameter, each in module.named_parameters(recurse=False)
        if each.dim() == 3
    ]


def parts(model: nn.Module) -> dict[str, Part]:
    """Return the weights of a model's experts, one by one, by name."""
    found = (part for name, each in modules(model).items() for part in parts_of(name, each))
    return {part.name: part for part in found}


def weights(model: nn.Module) -> set[str]:
    """Return the names of the parameters that a model's experts have their weights in."""
    return {f"{name}.{each}" for name, module in modules(model).items() for each in mixing.parameters(module)}


def parts_of(name: str, module: Any) -> Iterator[Part]:
    for number in range(module.num_experts):
        for parameter in mixing.parameters(module):
            inputs, outputs = shape(module, parameter)[1:]
            if not module.is_transposed:
                inputs, outputs = outputs, inputs
            yield Part(name, number, parameter, outputs, inputs, mixing.parameters(module))


def shape(module: Any, parameter: str) -> tuple[int, ...]:
    return module.on_disk[parameter][0] if is_hollow(module) else tuple(getattr(module, parameter).shape)


def is_hollow(module: Any) -> bool:
    """Tell whether the weights of experts are still on disk."""
    return hasattr(module, "on_disk")


def hollow_out(name: str, module: Any, sources: dict[str, Source]) -> None:
    """Take the weights from experts, to be read when their turn comes; biases stay."""
    on_disk = {
        each: (shape(module, each), sources.get(f"{name}.{each}")) for each in mixing.parameters(module)
    }
    for each in on_disk:
        delattr(module, each)
        setattr(module, each, _nothing())
    module.on_disk = on_disk


def _nothing() -> Tensor:
    """Return what lies where a weight was: transformers sets weights that no file has, if not told."""
    nothing = torch.empty(0)
    nothing._is_hf_initialized = True  # type: ignore[attr-defined]
    return nothing


def read(module: Any, parameter: str, tensors: Tensors, like: Any) -> Tensor:
    """Return a weight [experts, outputs, inputs], on the device of a model; raises ValueError."""
    if is_hollow(module):
        expected, source = module.on_disk[parameter]
        assert source is not None, "the weight of experts that come quantised"
        found = source.read(tensors, like.config).to(like.device)
        if tuple(found.shape) != expected:
            raise ValueError(f"{source.weight} is {tuple(found.shape)}; the config makes it {expected}")
    else:
        found = getattr(module, parameter).data
    return found.transpose(1, 2) if module.is_transposed else found


def bias(module: Any, parameter: str, number: int) -> Tensor | None:
    return getattr(module, f"{parameter}_bias").data[number] if module.has_bias else None


def _is_taken(module: Any) -> bool:
    if parallel.current() is not None:
        return False  # a rank has a share of them, which nothing here knows of
    if is_hollow(module):
        return True
    if not hasattr(module, "has_gate") or not all(
        _is_whole(module, each) for each in mixing.parameters(module)
    ):
        return False
    return describing.is_right(module)


def _is_whole(module: Any, parameter: str) -> bool:
    found = getattr(module, parameter, None)
    return isinstance(found, nn.Parameter) and found.dim() == 3 and len(found) == module.num_experts
