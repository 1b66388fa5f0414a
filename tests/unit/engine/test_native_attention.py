"""The compiled attention is that of the reference, on an engine's steps of requests with nested prefixes."""

import shutil
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule
from worker.engine import EngineConfig, attention, kv, loader, runner
from worker.engine.attention import Heads, Rotation, Scoring
from worker.engine.fast import FastEngine
from worker.engine.native import library
from worker.engine.native.attention import NativeAttention
from worker.engine.step import Step

_VOCABULARY = 60


@dataclass(frozen=True)
class Layer:
    """One layer's shape and how it scores; `rotates` 1 with rotary embedding, 2 with norms of heads too."""

    groups: int = 2
    heads_per_group: int = 2
    key_size: int = 8
    value_size: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rotates: int = 0


KINDS: dict[str, list[Layer]] = {
    "plain": [Layer(), Layer(1, 1, 64, 64), Layer(3, 8, 16, 16)],
    "sizes that fill no vector": [
        Layer(2, 3, 6, 6),
        Layer(1, 5, 20, 20),
        Layer(2, 1, 6, 20),
        Layer(1, 2, 33, 7),
    ],
    "key and value sizes": [Layer(4, 1, 24, 16), Layer(1, 7, 16, 24), Layer(2, 4, 8, 64)],
    "heads": [Layer(1, heads, 12, 12) for heads in range(1, 9)],
    "windows": [Layer(window=window) for window in (1, 2, 17, 96, 97, 150, 4096)],
    "softcap and sinks": [Layer(softcap=2.0), Layer(sinks=True), Layer(1, 3, 20, 6, 40, 1.5, True)],
    "rotation": [Layer(rotates=1), Layer(rotates=2), Layer(1, 3, 6, 20, None, None, True, 2)],
    "all together": [Layer(2, 6, 20, 6, 33, 3.0, True, 2), Layer(3, 1, 48, 16, 130, 9.0, False, 1)],
}


def summed(step: Step, layer: Heads, /) -> Tensor:
    """Attend as the definition says, in float64: sums of exponentials, part by part. A fast `reference`."""
    q, v, scoring = attention._write(step, layer).double(), layer.values, layer.scoring
    tokens, heads, _ = q.shape
    above = torch.zeros(tokens, heads, v.shape[2], dtype=torch.float64)
    below = torch.zeros(tokens, heads, dtype=torch.float64)
    if scoring.sinks is not None:
        below += scoring.sinks.double().exp()
    for part in (piece for whole in (*step.own, *step.shared) for piece in whole.pieces()):
        # What is not written yet may be anything; nobody sees it.
        keys, values = (
            side.double().nan_to_num(0, 0, 0).repeat_interleave(heads // side.shape[1], 1)
            for side in part.keys_values(layer.layer)
        )  # [n or 1, H, L, D]
        scores = (keys @ q[part.tokens][..., None])[..., 0] * scoring.scale  # [n, H, L]
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        seen = part.visible(scoring.window)
        weights = scores.exp() if seen is None else scores.exp().masked_fill(~seen[:, None], 0)
        above[part.tokens] += (weights[:, :, None] @ values)[:, :, 0]
        below[part.tokens] += weights.sum(-1)
    return (above / below[..., None]).to(v.dtype)


class BothWays(runner.StorageRunner):
    """A runner of layers with random queries, keys and values that attends natively and by an oracle."""

    def __init__(self, layers: list[Layer], dtype: torch.dtype, oracle: attention.Backend) -> None:
        kernels = library.kernels(dtype, torch.device("cpu"))
        if kernels is None:
            assert not any(map(shutil.which, library._COMPILERS)), "the kernels do not compile"
            pytest.skip("no C++ compiler on this machine")
        self.reads_beyond = False
        self.layout = kv.Layout(
            tuple((layer.groups, layer.key_size, layer.value_size) for layer in layers),
            dtype,
            torch.device("cpu"),
        )
        self.gap = 0.0
        self.parts = 0
        self.longest = 0
        self._layers = layers
        self._oracle = oracle
        self._native = NativeAttention(kernels)
        self._random = torch.Generator().manual_seed(0)
        self._sinks = [self._normal(layer.groups * layer.heads_per_group) for layer in layers]

    def step(self, step: Step) -> Tensor:
        for index, layer in enumerate(self._layers):
            step.attention_calls += 1
            heads = layer.groups * layer.heads_per_group
            inputs = (
                self._normal(len(step.ids), heads, layer.key_size),
                self._normal(len(step.ids), layer.groups, layer.key_size),
                self._normal(len(step.ids), layer.groups, layer.value_size),
            )
            sinks = self._sinks[index] if layer.sinks else None
            scoring = Scoring(layer.key_size**-0.5, layer.window, layer.softcap, sinks)
            rotation = self._rotation(layer, step.positions)
            # Native last: what it has written is what later steps see.
            copies = [x.clone() for x in inputs]
            wanted = self._oracle(step, Heads(index, *copies, scoring, rotation))
            found = self._native(step, Heads(index, *inputs, scoring, rotation))
            assert not bool(found.isnan().any())
            self.gap = max(self.gap, float((found - wanted).abs().max()))
        self.parts = max(self.parts, len(step.shared))
        self.longest = max(self.longest, int(step.positions.max()))
        return self._normal(len(step.wanted), _VOCABULARY)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.layout.dtype, generator=self._random)

    def _rotation(self, layer: Layer, positions: Tensor) -> Rotation | None:
        if not layer.rotates:
            return None
        half = layer.key_size // 2
        angles = positions[:, None] * 100 ** -(torch.arange(half, dtype=self.layout.dtype) / half)
        norms = None
        if layer.rotates == 2:
            norms = 1 + self._normal(layer.groups * (1 + layer.heads_per_group), layer.key_size) / 5
        return Rotation(angles.cos(), angles.sin(), norms, 1e-6)


def nested(seed: int) -> list[Any]:
    """Return requests with prefixes in common on several levels, up to more than two blocks of keys long."""
    rng = Random(seed)
    trunk = [rng.randrange(50) for _ in range(210)]
    prompts = [trunk[:length] + [50] * rng.choice((1, 30)) for length in (3, 90, 210, 210)]
    prompts += [prompts[3] + [51] * rng.randint(1, 20), prompts[3] + [52], prompts[0], [53]]
    return [
        request(str(i), prompt, max_tokens=rng.randint(1, 4), ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


def check(
    tiny_loaded: loader.Loaded,
    kind: str,
    worth_a_part: int,
    oracle: attention.Backend,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-12,
) -> None:
    runner = BothWays(KINDS[kind], dtype, oracle)
    config = EngineConfig(kv_memory_bytes=100_000 * runner.layout.token_bytes, prefill_chunk_tokens=40)
    engine = FastEngine(tiny_loaded, config, runner)
    engine._scheduler.admission.worth_a_part = worth_a_part
    Schedule(pauses=(0, 0, 0, 0, 2, 0, 1)).run(engine, nested(len(kind)))
    assert runner.gap <= bound
    assert runner.longest > 200
    assert worth_a_part or runner.parts > 2


everything = pytest.mark.parametrize("kind", KINDS)
with_and_without_parts = pytest.mark.parametrize("worth_a_part", [0, 1024])


@everything
@with_and_without_parts
def test_it_is_what_the_definition_says(tiny_loaded: loader.Loaded, kind: str, worth_a_part: int) -> None:
    check(tiny_loaded, kind, worth_a_part, summed)


@pytest.mark.long
@everything
@with_and_without_parts
def test_in_float32_it_is_the_same_up_to_rounding(
    tiny_loaded: loader.Loaded, kind: str, worth_a_part: int
) -> None:
    check(tiny_loaded, kind, worth_a_part, summed, torch.float32, 2e-5)


@pytest.mark.long
@everything
@with_and_without_parts
def test_it_is_the_reference(tiny_loaded: loader.Loaded, kind: str, worth_a_part: int) -> None:
    check(tiny_loaded, kind, worth_a_part, attention.reference)
