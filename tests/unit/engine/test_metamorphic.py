"""Outputs depend on a request alone: not on order, neighbours, batch size or sharing. All in float64."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine import architectures, exactness
from tests.unit.engine.exactness import Schedule
from worker.engine import Request

EVERYDAY = ("llama", "gpt_oss", "deepseek_v3")
NAMES = [
    name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long)
    for name in architectures.CONFIGS
    if name not in architectures.FALL_BACK
]
pytestmark = pytest.mark.parametrize("name", NAMES)
some = exactness.requests(most=14)


def outputs(
    open_subject: exactness.Open, name: str, requests: Sequence[Request], schedule: Schedule
) -> dict[str, list[int]]:
    return exactness.tokens_of(schedule.run(schedule.open(open_subject(name)), requests))


def sampled(requests: Sequence[Request]) -> list[Request]:
    """Return the same requests with draws of their own: different filters, some seeds in common."""
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}]
    return [
        replace(r, sampling=replace(r.sampling, temperature=0.9, seed=i // 2, **filters[i % 4]))
        for i, r in enumerate(requests)
    ]


@given(some, st.randoms(use_true_random=False))
@settings(max_examples=2)
def test_the_order_of_requests_changes_no_output(
    open_subject: exactness.Open, name: str, requests: list[Request], random: Random
) -> None:
    shuffled = random.sample(requests, len(requests))
    both = [outputs(open_subject, name, each, Schedule()) for each in (requests, shuffled)]
    assert both[0] == both[1]


@given(some)
@settings(max_examples=2)
def test_one_at_a_time_gives_what_64_at_a_time_give(
    open_subject: exactness.Open, name: str, requests: list[Request]
) -> None:
    one, many = (outputs(open_subject, name, requests, Schedule(config={"max_running": n})) for n in (1, 64))
    assert one == many


@given(some, st.sampled_from((0, 100, 1024)))
@settings(max_examples=2)
def test_sharing_prefixes_changes_no_output(
    open_subject: exactness.Open, name: str, requests: list[Request], worth: int
) -> None:
    on, off = (
        outputs(open_subject, name, requests, Schedule(worth_a_part=worth, config={"share_prefixes": shares}))
        for shares in (True, False)
    )
    assert on == off


@given(some, exactness.schedules)
@settings(max_examples=2)
def test_draws_depend_on_the_seed_alone(
    open_subject: exactness.Open, name: str, requests: list[Request], schedule: Schedule
) -> None:
    asked = sampled(requests)
    alone = {
        id: tokens
        for each in asked[:4]
        for id, tokens in outputs(open_subject, name, [each], Schedule()).items()
    }
    together = outputs(open_subject, name, asked, schedule)
    assert {id: together[id] for id in alone} == alone


def test_other_seeds_draw_other_tokens(open_subject: exactness.Open, name: str) -> None:
    base = exactness.request("0", list(range(30)), max_tokens=12, ignore_eos=True, temperature=0.9)
    asked = [replace(base, id=str(seed), sampling=replace(base.sampling, seed=seed)) for seed in range(8)]
    drawn = outputs(open_subject, name, asked, Schedule())
    assert len({tuple(tokens) for tokens in drawn.values()}) >= 4
