"""What drafts are made of, and how long they are."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine.conftest import request
from worker.engine import prefix
from worker.engine.drafts import chances, lookup
from worker.engine.drafts.model import Twin
from worker.engine.sequence import Sequence
from worker.engine.types import Row


def test_lookup_finds_the_latest_of_the_longest_run() -> None:
    tokens = [1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3]
    index = lookup.Index(tokens)
    assert index.draft(3) == [9, 8, 2]  # three tokens in common, not two
    tokens += [7, 6]
    assert index.draft(2) == [1, 2]
    tokens.append(50)
    assert index.draft(4) == []


def test_lookup_goes_on_with_a_text_that_repeats_itself() -> None:
    assert lookup.Index([5, 1, 2, 3, 1, 2, 3]).draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert lookup.Index([4, 4, 4]).draft(3) == [4, 4, 4]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.data())
def test_an_index_kept_by_and_by_is_that_of_the_whole(
    tokens: list[int], most: int, data: st.DataObject
) -> None:
    growing: list[int] = []
    index = lookup.Index(growing)
    for token in tokens:
        growing.append(token)
        if data.draw(st.booleans()):
            index.draft(most)
    assert index.draft(most) == lookup.Index(tokens).draft(most)


def test_drafts_are_as_long_as_their_tokens_bring_more_than_their_share() -> None:
    rates = [sum(0.9**j for j in range(k + 1)) / (12 + 1 + k) for k in range(21)]
    assert chances.lengths([0.9], [20], fixed=12, cost=0) == [rates.index(max(rates))]
    assert chances.lengths([0.9, 0.1], [3, 3], fixed=12, cost=0) == [3, 0]
    assert chances.lengths([0.5] * 16, [10] * 16, fixed=12, cost=0) == [0] * 16  # 16 tokens in the time of 28
    assert chances.lengths([0.5], [10], fixed=12, cost=1) < chances.lengths([0.5], [10], fixed=12, cost=0)
    assert chances.lengths([0.9], [20], fixed=128, cost=0) == [20]


def test_a_job_whose_drafts_fail_is_left_alone_and_tried_again() -> None:
    learned, one = chances.Chances(), _sequence("job")
    for _ in range(200):
        learned.learn(one, False)
    assert learned.of(one) < 0.01
    assert learned.of(_sequence("job")) < 0.05
    assert learned.of(_sequence("another")) > 0.5
    for _ in range(100):
        learned.forgive(one)
    assert learned.of(one) > 0.2


def test_a_draft_model_computes_again_what_follows_a_wrong_draft() -> None:
    twin = Twin(_sequence("job").row, None, "", prefix.Node([], 0, None), 0)  # type: ignore[arg-type]
    twin.follow([1, 2])
    twin.tokens += [3, 4, 5]
    twin.computed = 4
    twin.follow([1, 2, 8, 9])
    assert (twin.tokens, twin.computed) == ([1, 2, 8, 9], 2)
    twin.computed = 4
    twin.follow([1, 2, 8, 9])
    assert twin.computed == 3  # what follows its last token is wanted once more


def _sequence(job: str) -> Sequence:
    row = Row(replace(request("a", [1]), job=job))
    return Sequence(row, None, "", prefix.Node([], 0, None), 0, [1])  # type: ignore[arg-type]
