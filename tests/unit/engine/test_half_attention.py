"""Dense attention in half precision: parts are merged in float32, so that many levels round no more."""

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule, Subject
from worker.engine import attention, interface, loader, runner
from worker.engine.step import Step

_LEVELS = 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_shared_parts_are_as_exact_as_one(dtype: torch.dtype, tiny_loaded: loader.Loaded) -> None:
    gaps: dict[int, list[float]] = {}

    def compared(step: Step, heads: attention.Heads, /) -> Tensor:
        copied = dataclasses.replace(heads, queries=heads.queries.clone(), keys=heads.keys.clone())
        wanted = attention.reference(step, copied).float()
        found = attention.dense(step, heads)
        gap = float((found.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
        gaps.setdefault(len(step.shared), []).append(gap)
        return found

    model = architectures.build("llama").to(dtype)
    loaded = loader.wrap(model, tiny_loaded.tokenizer)
    model.set_attn_implementation(interface.NAME)
    engine = Schedule(worth_a_part=0).open(Subject(loaded, runner.ModelRunner(model, compared)))
    trunk = [(7 * i) % 250 for i in range(20 * _LEVELS)]
    prompts = [trunk[: 20 * level] + [branch] * 3 for level in range(1, _LEVELS + 1) for branch in (1, 2)]
    list(engine.generate([request(str(i), p, max_tokens=3, ignore_eos=True) for i, p in enumerate(prompts)]))
    engine.close()
    assert max(gaps) >= _LEVELS
    for found in gaps.values():
        assert sum(found) / len(found) < torch.finfo(dtype).eps / 3  # the parts are rounded, and the result
