"""Attention over pages, by flash-attn's stand-in, against each token's attention over all its keys."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.unit.engine import paged_forest
from tests.unit.engine.paged_forest import LAYER, PAGE, Forest, Row, Shape
from worker.engine import attention_flash, kv
from worker.engine.attention import Heads, Rotation, Scoring
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import HALVES, StandIn

SCORING = Scoring(0.3)
ATTEND = FlashAttention(StandIn(PAGE), PAGE)
MIXED = [
    Row((0,), 3, 1, True),
    Row((0, 1), 0, 1, True),
    Row((1,), 9, 1, True),
    Row((0, 1), 2, 5, False),
    Row((), 0, 7, False),
]


def attend(forest: Forest, scoring: Scoring, attention: FlashAttention = ATTEND) -> Tensor:
    return attention(forest.step, Heads(LAYER, forest.queries, forest.keys, forest.values, scoring))


def check(rows: list[Row], shape: Shape, scoring: Scoring, seed: int) -> None:
    forest = paged_forest.plant(rows, shape, seed)
    wanted = paged_forest.expected(forest, scoring)
    torch.testing.assert_close(attend(forest, scoring)[forest.tokens], wanted, rtol=1e-9, atol=1e-11)


@given(paged_forest.rows(), paged_forest.shapes, paged_forest.scorings, st.integers(0, 999))
@settings(max_examples=50)
@example(MIXED, Shape(), SCORING, 0)
@example(MIXED, Shape(padded_decodes=2, padded_shared=2), Scoring(0.3, softcap=2.0), 0)
@example([Row((0, 0, 0), PAGE - 1, 1, True, True)], Shape(), SCORING, 0)  # without own keys
@example([Row((), 2, 1, True)], Shape(padded_shared=1), SCORING, 0)  # nothing shared where something may be
@example([Row((0,), 2, 1, False), Row((0,), 2, 1, False)], Shape(padded_prefills=1), SCORING, 0)
def test_each_token_attends_to_all_its_keys(
    rows: list[Row], shape: Shape, scoring: Scoring, seed: int
) -> None:
    check(rows, shape, scoring, seed)


@pytest.mark.long
@given(paged_forest.rows(), paged_forest.shapes, paged_forest.scorings, st.integers(0, 999))
@settings(max_examples=3000, report_multiple_bugs=False)
@pytest.mark.timeout(900)
def test_each_token_attends_to_all_its_keys_in_many_forests(
    rows: list[Row], shape: Shape, scoring: Scoring, seed: int
) -> None:
    check(rows, shape, scoring, seed)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scoring", [SCORING, Scoring(0.3, 11), Scoring(0.3, softcap=2.0)])
def test_halves_are_right_to_their_precision(dtype: torch.dtype, scoring: Scoring) -> None:
    forest = paged_forest.plant(MIXED, Shape(dtype=dtype), 1)
    out = attend(forest, scoring, FlashAttention(StandIn(PAGE, HALVES), PAGE))
    assert out.dtype == dtype
    wanted = paged_forest.expected(forest, scoring)
    tolerance = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(out[forest.tokens].double(), wanted, rtol=tolerance, atol=tolerance)


def test_parts_are_merged_in_single_precision() -> None:
    """Many parts, each rounded once: rounding at each merge would go beyond one unit in the last place."""
    dtype = torch.bfloat16
    shape = Shape(dtype=dtype, branch_pages=(40, 1, 1), piece_pages=1)
    forest = paged_forest.plant([Row((0,), 3, 1, True)] * 4, shape, 2)
    out = attend(forest, SCORING).double()
    error = (out - paged_forest.expected(forest, SCORING)).abs().max()
    assert error < torch.finfo(dtype).eps / 2


def test_keys_and_values_are_written_where_the_step_says() -> None:
    forest = paged_forest.plant(MIXED, Shape(), 3)
    before = [layer.clone() for layer in forest.step.pool.keys]
    attend(forest, SCORING)
    pool = forest.step.pool
    assert torch.equal(pool.keys[LAYER].flatten(0, 1)[forest.step.slots], forest.keys)
    assert torch.equal(pool.values[LAYER].flatten(0, 1)[forest.step.slots], forest.values)
    others = torch.ones(pool.pages * PAGE, dtype=torch.bool).index_fill(0, forest.step.slots, False)
    unchanged = before[LAYER].flatten(0, 1)[others], pool.keys[LAYER].flatten(0, 1)[others]
    torch.testing.assert_close(*unchanged, rtol=0, atol=0, equal_nan=True)
    assert pool.keys[0].isnan().all()


def test_queries_and_keys_are_rotated_first() -> None:
    forest, again = (paged_forest.plant(MIXED, Shape(), 4) for _ in range(2))
    angles = torch.rand(
        len(forest.queries), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    rotation = Rotation(angles.cos(), angles.sin())
    inputs = forest.queries, forest.keys, forest.values
    out = ATTEND(forest.step, Heads(LAYER, *inputs, SCORING, rotation))
    again.queries, again.keys = rotation.apply(again.queries, again.keys)
    assert torch.equal(out, attend(again, SCORING))


class Calls:
    """Counts what is called, and passes it on."""

    def __init__(self) -> None:
        self.options: list[tuple[str, dict[str, Any]]] = []
        self._standin = StandIn(PAGE)

    def flash_attn_with_kvcache(self, *arguments: Any, **options: Any) -> Any:
        self.options.append(("decode", options))
        return self._standin.flash_attn_with_kvcache(*arguments, **options)

    def flash_attn_varlen_func(self, *arguments: Any, **options: Any) -> Any:
        self.options.append(("shared" if "causal" not in options else "prefill", options))
        return self._standin.flash_attn_varlen_func(*arguments, **options)


@pytest.mark.parametrize(
    ("window", "names"),
    [
        (None, ["decode", "prefill", "shared"]),
        (8, ["decode", "prefill"]),
        (999, ["decode", "prefill", "shared"]),
    ],
)
def test_what_is_shared_is_read_once_unless_a_window_hides_some_of_it(
    window: int | None, names: list[str]
) -> None:
    calls = Calls()
    forest = paged_forest.plant(MIXED, Shape(), 5)
    attend(forest, Scoring(0.3, window), FlashAttention(calls, PAGE))
    assert [name for name, _ in calls.options] == names
    assert all(("window_size" in options) == (window == 8) for _, options in calls.options)


class Asking(StandIn):
    """Asks the device for a number, as flash-attn does after 2.8.3."""

    def flash_attn_varlen_func(self, *arguments: Any, **options: Any) -> Any:
        int(options["block_table"].max())
        return super().flash_attn_varlen_func(*arguments, **options)


@pytest.mark.parametrize("window", [None, 8])
def test_nothing_waits_for_a_value_on_the_device(window: int | None) -> None:
    forest = paged_forest.plant(MIXED, Shape(padded_decodes=1, padded_shared=1), 6)
    scoring = Scoring(0.3, window, 2.0)
    with FakeTensorMode() as mode:
        fake = Forest(
            paged_forest.mapped(forest.step, mode.from_tensor),
            *map(mode.from_tensor, (forest.queries, forest.keys, forest.values)),
            [],
            [],
        )
        assert attend(fake, scoring).shape == forest.queries.shape
        with pytest.raises(DataDependentOutputException):
            attend(fake, scoring, FlashAttention(Asking(PAGE), PAGE))


SAME_SHAPES = Shape(branch_pages=(2, 2, 1), padded_shared=1, bounds=(9, 80))
RECORDED = [Row((0,), 3, 1, True), Row((0,), 9, 1, True), Row((1,), 3, 3, False), Row((), 4, 5, False)]
REPLAYED = [Row((0,), 6, 1, True), Row((1,), 12, 1, True), Row((1,), 1, 3, False), Row((), 9, 5, False)]


@pytest.mark.parametrize("window", [None, 8])
def test_what_is_recorded_of_one_step_computes_another_of_its_shape(window: int | None) -> None:
    """As a CUDA graph does: of tensors only their places are recorded, of all else the values."""
    scoring = Scoring(0.3, window)
    first, second = (
        paged_forest.plant(rows, SAME_SHAPES, 7 + i) for i, rows in enumerate((RECORDED, REPLAYED))
    )

    def run(inputs: list[Tensor]) -> Tensor:
        step = paged_forest.refilled(first.step, inputs[3:])
        return ATTEND(step, Heads(LAYER, *inputs[:3], scoring))

    def inputs(forest: Forest) -> list[Tensor]:
        return [forest.queries, forest.keys, forest.values, *paged_forest.tensors(forest.step)]

    shapes = [[tensor.shape for tensor in inputs(forest)] for forest in (first, second)]
    assert shapes[0] == shapes[1]
    run(inputs(first))  # a graph's warm-up: nothing is to be kept of it
    recorded = make_fx(run)(inputs(first))
    for forest in (second, first):
        out = recorded(inputs(forest))
        torch.testing.assert_close(out[forest.tokens], paged_forest.expected(forest, scoring))


CUDA = kv.Layout(((2, 64, 64),), torch.float16, torch.device("cuda"))


def layout(*layers: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> kv.Layout:
    return kv.Layout(layers, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("of", "scoring", "reason"),
    [
        (layout((2, 64, 64), (2, 264, 264)), SCORING, "heads of 264"),
        (layout((2, 60, 60)), SCORING, "heads of 60"),
        (layout((2, 192, 128)), SCORING, "keys of 192 and values of 128"),
        (layout((2, 64, 64)), Scoring(1.0, sinks=torch.zeros(4)), "sinks"),
        (kv.Layout(CUDA.layers, torch.float32, CUDA.device), SCORING, "float32"),
        (layout((2, 64, 64)), Scoring(1.0, 128, 30.0), "CUDA device, not cpu"),
    ],
)
def test_models_that_flash_attn_cannot_serve_are_told_why(
    of: kv.Layout, scoring: Scoring, reason: str
) -> None:
    found = attention_flash.why_not(of, [scoring] * len(of.layers))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ((7, 5), "2.8.3", "compute capability 8.0"),
        ((8, 0), "2.8.4", "2.8.4 is installed, not 2.8.3"),
        ((9, 0), "2.8.3", None),
    ],
)
def test_old_cards_and_other_versions_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str, reason: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = attention_flash.why_not(CUDA, [SCORING])
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_a_missing_flash_attn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "No module named 'flash_attn'" in (attention_flash.why_not(CUDA, [SCORING]) or "")
    with pytest.raises(attention_flash.Unavailable, match="cannot be imported"):
        attention_flash.load()
