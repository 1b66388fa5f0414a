"""All products of a model quantised, one full weight in memory at a time, or those of one layer's experts."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from worker.engine import parallel
from worker.engine.quantize import experts, filling, hollow, rounding, shares, turns
from worker.engine.quantize.recipe import Recipe, fitting_group
from worker.engine.quantize.tensors import Tensors
from worker.engine.quantize.turns import Progress
from worker.engine.quantize.weights import GroupedWeight

log = logging.getLogger(__name__)


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
    rounding.refuse_infinite(name, rows)
    if parallel.is_share(model):
        shares.put_rows(model, name, rows, head.weight.shape[0])
    else:
        filling.replace(model, name, rows)


def choose(recipe: Recipe) -> hollow.Choose:
    """Return what tells which products' weights need not be loaded: those that can be read one by one."""

    def those(tensors: Tensors, model: nn.Module) -> set[str]:
        return {
            name
            for name, product in turns.require_fitting(model, recipe).items()
            if _can_be_read(tensors, name, product)
        }

    return those


def _can_be_read(tensors: Tensors, name: str, product: Any) -> bool:
    if isinstance(product, experts.Part):
        return all(weight in tensors.sources for weight in product.together)
    weight = f"{name}.weight"
    shape = product.out_features, product.in_features
    return weight in tensors and tensors.shape(weight) == shape[:: -1 if hollow.is_transposed(product) else 1]


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
    run = turns.Turns(model, tensors, recipe, progress, in_place)
    if ids is not None:
        run.wait_for_inputs()
        model.base_model(input_ids=ids.to(model.device), use_cache=False)
    run.finish()
    return run.done
