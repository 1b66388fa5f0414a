import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.engine import footprint, kv, sizing
from worker.engine.footprint import Footprint
from worker.engine.sizing import DoesNotFit, Settings

GB = 10**9
_LAYOUT = kv.Layout(((8, 128, 128),) * 36, torch.bfloat16, torch.device("meta"))
_FOUR_BILLION = Footprint(
    name="Model",
    dtype=torch.bfloat16,
    parameters=4_000_000_000,
    weight_bytes=8 * GB,
    products=3_600_000_000,
    head=390_000_000,
    attention=294_912,
    layout=_LAYOUT,
    step_bytes=GB // 2,
    decode_bytes=GB // 50,
    vocabulary=150_000,
    context_tokens=262_144,
)


def _need(**changed: Any) -> Footprint:
    return dataclasses.replace(_FOUR_BILLION, **changed)


def _plan(need: Footprint = _FOUR_BILLION, memory: int = 24 * GB, **changed: Any) -> sizing.Plan:
    return sizing.plan(need, memory, **{"context": 4096, "max_running": 64, **changed})


def test_pool_is_what_is_free_after_loading_less_the_step_graphs_and_spare() -> None:
    left = sizing.kv_bytes_after_profile(23 * GB, 15 * GB, GB, 24 * GB, Settings(graph_bytes=2 * GB))
    assert left == 12 * GB - sizing.spare_bytes(24 * GB)


def test_memory_of_other_processes_is_not_given_to_the_pool() -> None:
    alone = sizing.kv_bytes_after_profile(23 * GB, 15 * GB, GB, 24 * GB, Settings())
    beside = sizing.kv_bytes_after_profile(18 * GB, 10 * GB, GB, 24 * GB, Settings())
    assert alone - beside == 5 * GB


def test_a_wish_for_kv_is_granted_exactly_or_refused_with_what_is_left() -> None:
    args = (23 * GB, 15 * GB, GB, 24 * GB)
    assert sizing.kv_bytes_after_profile(*args, Settings(kv_memory_bytes=5 * GB)) == 5 * GB
    with pytest.raises(DoesNotFit, match=r"kv_memory_bytes asks for 20\.0 GB, but 13\.0 GB are left"):
        sizing.kv_bytes_after_profile(*args, Settings(kv_memory_bytes=20 * GB))


@given(
    memory=st.integers(16, 300).map(lambda gb: gb * GB),
    running=st.integers(1, 512),
    context=st.integers(1, 200_000),
    host=st.integers(0, 500).map(lambda gb: gb * GB),
)
def test_the_parts_of_a_plan_are_the_card_and_its_figures_follow_from_the_pages(
    memory: int, running: int, context: int, host: int
) -> None:
    plan = _plan(memory=memory, max_running=running, context=context, host_bytes=host)
    parts = plan.weight_bytes + plan.step_bytes + plan.graph_bytes + plan.other_bytes + plan.kv_bytes
    assert parts == memory
    assert plan.page_bytes == 256 * 36 * 8 * 2 * 128 * 2
    assert plan.pages * plan.page_bytes <= plan.kv_bytes < (plan.pages + 1) * plan.page_bytes
    assert plan.host_pages * plan.page_bytes <= host
    pages_a_request = (context + 255) // 256
    assert plan.requests * pages_a_request <= plan.pages < (plan.requests + 1) * pages_a_request
    assert plan.longest == min(plan.tokens, 262_144)
    staging = 2 * min(16, max(1, plan.pages // 8))
    longest = max(plan.pages, plan.pages - staging + plan.host_pages if plan.pages - staging > 1 else 0)
    assert plan.longest_with_host == min(longest * 256, 262_144)


@given(st.integers(1, 600))
def test_every_batch_has_a_graph_with_little_padding(running: int) -> None:
    sizes = sizing.graph_sizes(running)
    assert sizes[-1] >= running
    for rows in range(1, running + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(rows / 4, min(8, rows))


def test_without_graphs_their_memory_goes_to_kv() -> None:
    with_graphs, without = _plan(), _plan(cuda_graphs=False)
    assert without.graph_bytes == 0
    assert without.graph_sizes == ()
    assert without.kv_bytes == with_graphs.kv_bytes + with_graphs.graph_bytes
    assert with_graphs.graph_bytes > sum(with_graphs.graph_sizes) * 150_000 * 2, "the logits of each stay"


def test_weights_that_do_not_fit_name_what_would() -> None:
    need = _need(dtype=torch.float32, weight_bytes=16 * GB)
    with pytest.raises(DoesNotFit) as error:
        _plan(need, 14 * GB)
    assert "the weights take 16.0 GB" in str(error.value)
    fits = str(error.value).partition("What fits: ")[2]
    assert fits == "bfloat16, tensor parallel over 2 such cards, INT4 weights (3.6 GB)"


@pytest.mark.parametrize("memory", range(3, 18))
def test_what_is_said_to_fit_does(memory: int) -> None:
    """Each advice, followed, gives a plan, and what is not advised does not."""
    need = _need(dtype=torch.float32, weight_bytes=16 * GB)
    try:
        _plan(need, memory * GB)
    except DoesNotFit as error:
        advice = str(error)
    else:
        return
    # The same step and graphs, as the advice reckons: they are a little smaller in half precision.
    half = _need(weight_bytes=8 * GB, vocabulary=2 * need.vocabulary)
    assert ("bfloat16" in advice) == _fits(half, memory * GB)
    for cards in (2, 4, 8):
        shared = _need(dtype=torch.float32, weight_bytes=16 * GB // cards)
        if f"over {cards} such" in advice:
            assert _fits(shared, memory * GB)
            break
        assert not _fits(shared, memory * GB)


def _fits(need: Footprint, memory: int) -> bool:
    try:
        _plan(need, memory)
    except DoesNotFit:
        return False
    return True


def test_cards_that_cannot_share_the_heads_are_not_advised() -> None:
    odd = kv.Layout(((3, 128, 128),) * 36, torch.bfloat16, torch.device("meta"))
    with pytest.raises(DoesNotFit) as error:
        _plan(_need(layout=odd), 7 * GB)
    assert "tensor parallel" not in str(error.value)


def test_a_card_with_less_than_a_page_left_is_refused() -> None:
    taken = 24 * GB - _plan().kv_bytes
    spare = sizing.spare_bytes(24 * GB) - sizing.spare_bytes(taken)
    with pytest.raises(DoesNotFit, match=r"less than a page of 37\.7 MB"):
        _plan(memory=taken - spare + 10_000_000)


def test_the_bytes_of_a_forward_are_those_held_at_once() -> None:
    def run() -> torch.Tensor:
        x = torch.empty(1000, device="meta", dtype=torch.float32)
        y = x + 1
        view = y.view(10, 100)[:5]
        del x, y
        return view * 2  # y lives through its view

    assert footprint.peak_bytes(run) == 8000
