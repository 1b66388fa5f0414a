"""Which tensors of a checkpoint make a model's weight, where that is merged of several or has another name.

transformers has rules for that, by architecture: experts lie apart in most checkpoints, and in one weight in
the model. The rules are asked here, so that one weight can be made at a time.
"""

import copy
import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from worker.engine.quantize.tensors import Tensors


@dataclass
class Source:
    """What a weight is made of: `names` by the pattern of a rule that they match, in the rule's order."""

    weight: str
    rule: WeightConverter | None
    names: dict[str, list[str]] = field(default_factory=dict)

    @property
    def all_names(self) -> list[str]:
        return [name for names in self.names.values() for name in names]

    def read(self, tensors: Tensors, config: Any) -> Tensor:
        """Return the weight; raises ValueError when tensors do not make one."""
        if self.rule is None:
            return tensors.read(self.all_names[0])
        rule = copy.deepcopy(self.rule)
        for pattern, names in self.names.items():
            for name in names:
                read: Any = functools.partial(tensors.read, name)
                rule.add_tensor(self.weight, name, pattern, read)
        try:
            made = rule.convert(self.weight, config=config)[self.weight]
        except (KeyError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"the checkpoint's tensors do not make {self.weight}: {reason}") from error
        return made[0] if isinstance(made, list) else made

    def apart(self) -> list[list[str]] | None:
        """Return the names that make each of the merged weights, whose outputs lie one behind another.

        None where a rule does more than merge.
        """
        if self.rule is None or not all(_merges(each) for each in self.rule.operations):
            return None
        columns = [self.names.get(pattern, []) for pattern in self.rule.source_patterns]
        even = {len(column) for column in columns} == {len(columns[0])}
        return [list(row) for row in zip(*columns, strict=True)] if even else None


def _merges(operation: Any) -> bool:
    kind = type(operation)
    return (kind is MergeModulelist and operation.dim == 0) or (kind is Concatenate and operation.dim == 1)


def sources(model: Any, names: Collection[str], wanted: Collection[str]) -> dict[str, Source]:
    """Return what makes those of a model's wanted weights that a checkpoint's names make, by weight.

    The model has to have the weights, on whatever device.
    """
    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = model.state_dict()
    found: dict[str, Source] = {}
    for name in sorted(names, key=dot_natural_key):
        weight, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if weight not in known and name in known:
            weight, pattern = name, None
        if weight in wanted:
            source = found.setdefault(weight, Source(weight, by_pattern.get(pattern or "")))
            source.names.setdefault(pattern or "", []).append(name)
    return found
