"""Steps without a model: what of a stream of rows they keep, whatever its batches."""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.dataset import quality, transforms
from jobs.dataset.input import input_errors, rows


def batch(numbers: Iterable[int], **columns: Any) -> rows.Rows:
    return rows.Rows(rows.numbers(list(numbers)), pa.RecordBatch.from_pydict(columns))


def ran(step: transforms.Transform, *batches: rows.Rows) -> list[tuple[int, dict[str, Any]]]:
    if batches:
        assert step.columns(batches[0].batch.schema)
    found = list(step.apply(iter(batches)))
    return [
        pair for each in found for pair in zip(each.numbers.to_pylist(), each.batch.to_pylist(), strict=True)
    ]


def where(expression: str, faults: list[rows.Fault]) -> transforms.Where:
    return transforms.Where(expression, lambda row: f"line {row + 1}", faults.append)


def test_where_keeps_rows_with_their_numbers_and_counts_the_others() -> None:
    step = where("n % 2 = 1", [])
    found = ran(step, batch([5, 6, 7], n=[1, 2, None]), batch([8], n=[3]))
    assert found == [(5, {"n": 1}), (8, {"n": 3})]
    assert step.dropped == 2


def test_a_row_for_which_where_fails_is_a_fault_and_not_dropped_as_well() -> None:
    faults: list[rows.Fault] = []
    step = where("CAST(t AS INT) > 1", faults)
    assert ran(step, batch([0, 1, 2], t=["1", "x", "2"])) == [(2, {"t": "2"})]
    assert [(fault.row, fault.where) for fault in faults] == [(1, "line 2")]
    assert step.dropped == 1


def test_where_refuses_a_missing_column_before_any_row() -> None:
    with pytest.raises(input_errors.ColumnMissing, match="'m'"):
        where("m > 1", []).columns(pa.schema([("n", pa.int64())]))


def test_filters_of_a_text_take_null_for_an_empty_one() -> None:
    step = transforms.Texts("t", quality.Filters(min_chars=2, reject="no"))
    found = ran(step, batch([0, 1, 2, 3], t=["ab", "a", None, "know"]))
    assert found == [(0, {"t": "ab"})]
    assert step.dropped == 3


@pytest.mark.parametrize("threshold", [None, 0.8])
def test_the_first_of_equal_texts_stays_over_batches_and_nulls_stay(
    tmp_path: Path, threshold: float | None
) -> None:
    step = transforms.Distinct("t", threshold, tmp_path / "dedupe")
    with step:
        found = ran(step, batch([0, 1, 2], t=["a b c", None, "d e f"]), batch([3, 4], t=["a b c", None]))
        later = ran(step, batch([5, 6], t=["d e f", "g h i"]))
    assert [number for number, _ in found + later] == [0, 1, 2, 4, 6]
    assert step.dropped == 2


@pytest.mark.parametrize(
    "step", [transforms.Texts("n", quality.Filters(max_chars=1)), transforms.Distinct("n", None, Path("x"))]
)
def test_what_looks_at_text_refuses_other_columns(step: transforms.Transform) -> None:
    with pytest.raises(transforms.NotText, match="'n' is int64"):
        step.columns(pa.schema([("n", pa.int64())]))
    with pytest.raises(input_errors.ColumnMissing, match="'n'"):
        step.columns(pa.schema([("m", pa.string())]))


@given(
    lists=st.lists(st.none() | st.lists(st.none() | st.integers(0, 9), max_size=4), min_size=1, max_size=8),
    start=st.integers(0, 3),
    large=st.booleans(),
)
def test_each_item_of_a_list_becomes_a_row_in_their_order(lists: Any, start: int, large: bool) -> None:
    kind = (pa.large_list if large else pa.list_)(pa.int64())
    whole = batch(range(len(lists)), id=list(map(str, range(len(lists)))), l=pa.array(lists, kind))
    sliced = rows.Rows(whole.numbers.slice(start), whole.batch.slice(start))
    step = transforms.Expand("l", "item")
    wanted = [
        (at, {"id": str(at), "item": item})
        for at, items in enumerate(lists)
        for item in items or ()
        if at >= start
    ]
    assert ran(step, sliced) == wanted
    assert step.dropped == sum(not items for items in lists[start:])


def test_items_that_are_structs_or_lists_stay_whole() -> None:
    value = [[{"q": "a", "n": [1, None]}, None], [{"q": None, "n": None}]]
    assert ran(transforms.Expand("l", "l"), batch([3, 9], l=value)) == [
        (3, {"l": {"q": "a", "n": [1, None]}}),
        (3, {"l": None}),
        (9, {"l": {"q": None, "n": None}}),
    ]


def test_lists_of_a_fixed_size_are_lists() -> None:
    lists = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    step = transforms.Expand("l", "l")
    assert ran(step, batch([0, 1, 2], l=lists)) == [
        (0, {"l": 1}),
        (0, {"l": 2}),
        (2, {"l": 3}),
        (2, {"l": 4}),
    ]
    assert step.dropped == 1


def test_a_long_list_comes_in_batches_of_the_usual_size() -> None:
    given = batch([0, 1], text=["x" * 10_000, "y"], l=[list(range(2500)), [1]])
    found = list(transforms.Expand("l", "l").apply(iter([given])))
    assert [each.batch.num_rows for each in found] == [1000, 1000, 501]
    assert sum(each.batch.num_rows for each in found) == 2501


def test_expand_says_which_columns_come_out() -> None:
    schema = pa.schema([("a", pa.int64()), ("l", pa.list_(pa.string())), ("b", pa.int64())])
    assert transforms.Expand("l", "item").columns(schema).names == ["a", "item", "b"]
    assert transforms.Expand("l", "l").columns(schema).field("l").type == pa.string()


def test_expand_refuses_what_is_no_list_and_a_name_that_is_taken() -> None:
    schema = pa.schema([("a", pa.string()), ("l", pa.list_(pa.string()))])
    with pytest.raises(transforms.NotAList, match="'a' is string"):
        transforms.Expand("a", "a").columns(schema)
    with pytest.raises(transforms.ColumnTaken, match="'a'"):
        transforms.Expand("l", "a").columns(schema)
    with pytest.raises(input_errors.ColumnMissing):
        transforms.Expand("m", "m").columns(schema)


SCORED = st.lists(
    st.tuples(st.integers(0, 4), st.none() | st.integers(0, 3)), max_size=20
).map(lambda pairs: sorted(pairs, key=lambda pair: pair[0]))  # fmt: skip


@given(pairs=SCORED, cuts=st.sets(st.integers(1, 19)), least=st.none() | st.integers(0, 3))
def test_the_first_of_the_best_of_each_row_stays_wherever_batches_end(
    pairs: list[tuple[int, int | None]], cuts: set[int], least: int | None
) -> None:
    bounds = [0, *sorted(cut for cut in cuts if cut < len(pairs)), len(pairs)]
    batches = [
        batch(
            (number for number, _ in pairs[a:b]),
            score=pa.array([score for _, score in pairs[a:b]], pa.int64()),
            at=range(a, b),
        )
        for a, b in itertools.pairwise(bounds)
        if b > a
    ]
    wanted = []
    for number in sorted({number for number, _ in pairs}):
        fit = [
            (score, -at)
            for at, (row, score) in enumerate(pairs)
            if row == number and score is not None and (least is None or score >= least)
        ]
        if fit:
            score, at = max(fit)
            wanted.append((number, {"score": score, "at": -at}))
    step = transforms.Best("score", one=True, least=least)
    assert ran(step, *batches) == wanted
    assert step.dropped == len(pairs) - len(wanted)


def test_a_judge_that_only_has_a_least_score_keeps_all_that_reach_it() -> None:
    step = transforms.Best("score", one=False, least=2)
    found = ran(step, batch([0, 0, 1, 1], score=[2.0, 3.0, 1.5, None]))
    assert [row["score"] for _, row in found] == [2.0, 3.0]
    assert step.dropped == 2


def test_a_score_must_be_a_number() -> None:
    with pytest.raises(transforms.NotANumber, match="'score' is string"):
        transforms.Best("score", one=True).columns(pa.schema([("score", pa.string())]))
    with pytest.raises(input_errors.ColumnMissing):
        transforms.Best("score", one=True).columns(pa.schema([("s", pa.int64())]))
