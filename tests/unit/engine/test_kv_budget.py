"""What is measured of a card, in which order, and what is left for KV. The card is numbers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import errors
from tests.unit.engine.conftest import request
from worker.engine import (
    EngineConfig,
    choosing,
    fast,
    footprint,
    guards,
    kv_budget,
    loader,
    opening,
    parallel,
    sizing,
)
from worker.engine.attention_flash import FlashAttention
from worker.engine.flash_standin import StandIn

GB = 10**9
_CONFIG = EngineConfig(max_running=4, prefill_chunk_tokens=40, cuda_graphs=False)


class Numbers:
    """A card of 24 GB with 15 GB free; `events` are what was asked of it."""

    def __init__(self, free: int = 15 * GB) -> None:
        self._free = free
        self.events: list[str] = []
        self.peaks: list[int] = []

    def free_bytes(self) -> int:
        self.events.append("free")
        return self._free

    def total_bytes(self) -> int:
        return 24 * GB

    def peak_bytes(self, run: Callable[[], object]) -> int:
        self.events.append("peak")
        self.peaks.append(footprint.peak_bytes(run))
        return self.peaks[-1]


def load(tiny_path: Path) -> loader.Loaded:
    """Load a model, which will be changed, as if 23 GB had been free before."""
    loaded = loader.load(str(tiny_path), EngineConfig(device="cpu", dtype="float32"))
    return replace(loaded, free_before=23 * GB)


@pytest.fixture
def subject(tiny_path: Path) -> loader.Loaded:
    return load(tiny_path)


def left(free: int = 15 * GB) -> int:
    return free - sizing.spare_bytes(24 * GB)


@pytest.mark.parametrize("faster", [True, False])
def test_kv_has_what_is_free_after_loading_less_the_largest_step(
    subject: loader.Loaded, faster: bool
) -> None:
    """The model as the engine runs it: prepared, its layers fused where they are."""
    ready = guards.prepare(subject.model, "auto" if faster else "reference")
    card = Numbers()
    found = kv_budget.of(subject, _CONFIG, ready, card).kv_bytes
    assert card.events == ["free", "peak"], "what was free must not lack what the step leaves in caches"
    assert found == left() - card.peaks[0]
    logits = _CONFIG.max_running * subject.vocabulary * 4
    assert card.peaks[0] > (40 + 4) * subject.model.config.hidden_size * 4 + logits


def test_more_tokens_and_more_rows_take_more(subject: loader.Loaded) -> None:
    ready = guards.prepare(subject.model)
    cards = [Numbers() for _ in range(3)]
    for card, changed in zip(cards, ({}, {"prefill_chunk_tokens": 400}, {"max_running": 300}), strict=True):
        kv_budget.of(subject, replace(_CONFIG, **changed), ready, card)
    peaks = [card.peaks[0] for card in cards]
    assert peaks[1] > 5 * peaks[0]
    draws = 296 * subject.vocabulary * 8
    assert peaks[2] - peaks[0] > draws, "the choice of tokens for all that run is part of it"


def test_graphs_have_their_part_where_there_are_pages(tiny_path: Path, subject: loader.Loaded) -> None:
    wanted, other = replace(_CONFIG, cuda_graphs=True), load(tiny_path)
    dense = kv_budget.of(other, wanted, guards.prepare(other.model, "dense"), Numbers())
    paged, card = guards.prepare(subject.model, FlashAttention(StandIn())), Numbers()
    with_graphs = kv_budget.of(subject, wanted, paged, card)
    assert card.events == ["free", "peak", "peak"]
    expected = sizing.graph_bytes(sizing.graph_sizes(4), card.peaks[1], subject.vocabulary * 4)
    assert 0 < card.peaks[1] < card.peaks[0]
    assert with_graphs == kv_budget.Budget(left() - card.peaks[0] - expected, expected)
    assert dense.kv_bytes > with_graphs.kv_bytes


def test_a_draft_model_has_its_kv_beside(subject: loader.Loaded) -> None:
    ready = guards.prepare(subject.model)
    drafting = replace(_CONFIG, speculate="draft", draft_model="any", draft_kv_memory_bytes=GB)
    without, beside = (
        kv_budget.of(subject, config, ready, Numbers()).kv_bytes for config in (_CONFIG, drafting)
    )
    assert without - beside == GB


def test_a_wish_is_granted_or_refused_with_what_is_left(subject: loader.Loaded) -> None:
    ready = guards.prepare(subject.model)
    assert kv_budget.of(subject, replace(_CONFIG, kv_memory_bytes=GB), ready, Numbers()).kv_bytes == GB
    with pytest.raises(sizing.DoesNotFit, match=r"asks for 20\.0 GB, but 14\.0 GB are left: of 23\.0 GB"):
        kv_budget.of(subject, replace(_CONFIG, kv_memory_bytes=20 * GB), ready, Numbers())
    with pytest.raises(sizing.DoesNotFit, match="nothing is left for KV"):
        kv_budget.of(subject, _CONFIG, ready, Numbers(free=GB // 2))
    with pytest.raises(sizing.DoesNotFit, match="are left for KV, less than"):
        kv_budget.of(subject, replace(_CONFIG, kv_memory_bytes=10), ready, Numbers())


def test_a_team_has_what_its_smallest_card_has(
    subject: loader.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = guards.prepare(subject.model)
    alone = kv_budget.of(subject, _CONFIG, ready, Numbers()).kv_bytes

    class Team:
        def least(self, value: int) -> int:
            return value - 3 * GB

    monkeypatch.setattr(parallel, "current", Team)
    assert kv_budget.of(subject, _CONFIG, ready, Numbers()).kv_bytes == alone - 3 * GB


def test_on_a_cpu_it_is_a_share_of_what_is_free(subject: loader.Loaded) -> None:
    ready = guards.prepare(subject.model)
    assert subject.device.type == "cpu"
    found, free = kv_budget.of(subject, _CONFIG, ready).kv_bytes, ready.device.free_bytes()
    assert 0.1 * free < found < 0.5 * free
    assert kv_budget.of(subject, replace(_CONFIG, kv_memory_bytes=12345), ready).kv_bytes == 12345


def test_the_profile_leaves_an_engine_that_says_the_same(subject: loader.Loaded) -> None:
    asked = [request("a", [1, 2, 3])]
    ready = guards.prepare(subject.model)
    outputs = []
    for _ in range(2):
        engine = fast.FastEngine(subject, replace(_CONFIG, kv_memory_bytes=1 << 24), ready)
        outputs.append([c.token_ids for c in engine.generate(asked)])
        kv_budget.of(subject, _CONFIG, ready, Numbers())
    assert outputs[0] == outputs[1]


def test_an_engine_that_has_no_room_says_what_would_fit(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = kv_budget.of

    def on_a_card(loaded: loader.Loaded, config: EngineConfig, ready: Any) -> kv_budget.Budget:
        return measured(loaded, config, ready, Numbers(free=GB // 2))

    monkeypatch.setattr(kv_budget, "of", on_a_card)
    monkeypatch.setattr(kv_budget.Card, "total_bytes", lambda self: 24 * GB)
    with pytest.raises(errors.ModelUnavailable, match=r"nothing is left for KV.*What fits: .*INT4 weights"):
        opening.open_model(str(tiny_path), replace(_CONFIG, device="cpu", dtype="float32"))


def test_the_draw_of_the_profile_is_one_that_counts(subject: loader.Loaded) -> None:
    """A row whose logits are no numbers would be left out of the draw."""
    state = kv_budget._drawing()
    choosing.choose([state], torch.zeros(1, subject.vocabulary))
    assert state.failure is None
    assert not state.row.request.sampling.greedy
