"""A model without the weights of its layers' products: transformers loads the rest."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from worker.engine.quantize import experts, merging
from worker.engine.quantize.tensors import Tensors
from worker.engine.source import load_weights

_METHOD = "longhaul-hollow"
Choose = Callable[[Tensors, nn.Module], set[str]]
"""Of a checkpoint's tensors and a model on the meta device: the names of the products to be hollow."""


class Hollow(nn.Module):
    """A linear layer whose weight is still on disk, as [inputs, outputs] if `transposed`; its bias is here.

    `weight` is empty, for models whose code to make one up asks for it.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias, self.transposed = linear.bias, is_transposed(linear)
        weight: Any = torch.empty(0, device="cpu")
        weight._is_hf_initialized = True
        self.weight = weight


def is_transposed(linear: nn.Module) -> bool:
    """Tell whether a checkpoint has the weight of a linear layer as [inputs, outputs], as GPT-2's do."""
    return getattr(linear, "transposed", False)


def read(tensors: Tensors, name: str, linear: nn.Module) -> Tensor:
    """Return the weight [outputs, inputs] of a linear layer from a checkpoint."""
    weight = tensors.read(f"{name}.weight")
    return weight.T.contiguous() if is_transposed(linear) else weight


def with_linears(model: nn.Module) -> dict[str, Conv1D]:
    """Put linear layers in the place of transformers' Conv1D, which are the same; return what was there."""
    found = {name: each for name, each in model.named_modules() if type(each) is Conv1D}
    for name, each in found.items():
        linear: Any = nn.Linear(each.nx, each.nf, device="meta")
        linear.weight = nn.Parameter(each.weight.data.T, requires_grad=False)
        linear.bias, linear.transposed = each.bias, True
        put(model, name, linear)
    return found


def linears(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers of a model by name, hollow or not."""
    return {name: module for name, module in model.named_modules() if type(module) in (nn.Linear, Hollow)}


def all_products(model: nn.Module) -> dict[str, Any]:
    """Return the linear layers of a model by name, and the parts of its experts."""
    return linears(model) | experts.parts(model)


def products(model: nn.Module) -> dict[str, Any]:
    """Return those of a model's repeated layers: neither embeddings nor heads."""
    repeated = tuple(f"{name}." for name, each in model.named_modules() if isinstance(each, nn.ModuleList))
    return {name: each for name, each in all_products(model).items() if name.startswith(repeated)}


def empty(model: nn.Module) -> dict[str, list[str]]:
    """Return, by module, the names of products whose weights are still on disk."""
    found = {name: [name] for name, each in linears(model).items() if type(each) is Hollow}
    for name, each in experts.modules(model).items():
        if experts.is_hollow(each):
            found[name] = [part.name for part in experts.parts_of(name, each)]
    return found


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another, by name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def load(
    auto: Any, location: str, options: dict[str, Any], choose: Choose, pickles: bool
) -> tuple[Any, Tensors]:
    """Load all of a model but the weights of what `choose` names; return it with its checkpoint's tensors."""
    model = load_weights(auto, location, pickles, options | {"quantization_config": _LeaveOut(choose)})
    tensors = model.hf_quantizer.tensors
    with_linears(model)
    model.hf_quantizer.remove_quantization_config(model)
    model.config._is_quantized = False
    return model, tensors


@register_quantization_config(_METHOD)
class _LeaveOut(QuantizationConfigMixin):
    """How transformers is told: it asks what it takes for a quantiser before it loads anything."""

    quant_method: Any = _METHOD

    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": _METHOD}


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):
    quantization_config: _LeaveOut
    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        self.tensors = Tensors(checkpoint_files or ())
        others = with_linears(model)
        self.tensors.sources = merging.sources(model, self.tensors.names, experts.weights(model))
        with torch.device("cpu"):  # transformers has all tensors made here lie on the meta device
            chosen = self.quantization_config.choose(self.tensors, model)
        emptied = _empty_out(model, chosen, self.tensors)
        for name in others.keys() - emptied:  # these are loaded whole, as the checkpoint has them
            put(model, name, others[name])
        # Else transformers warns of each weight that it has no place for.
        model._keys_to_ignore_on_load_unexpected.update(rf"^{re.escape(name)}\." for name in emptied)


def _empty_out(model: nn.Module, chosen: set[str], tensors: Tensors) -> set[str]:
    """Make products hollow, experts all at once; return the names of their modules."""
    found = all_products(model)
    names = {each.owner if isinstance(each := found[name], experts.Part) else name for name in chosen}
    for name in names:
        module = model.get_submodule(name)
        if type(module) is nn.Linear:
            put(model, name, Hollow(module))
        else:
            experts.hollow_out(name, module, tensors.sources)
    return names
