import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import errors
from jobs.dataset import making, recipe, report, steps
from jobs.dataset.input import input_errors, source
from tests.unit.dataset import backends

Row = dict[str, Any]


class Maker:
    """Makes a dataset of rows in one directory, again and again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(
        self,
        rows: Any,
        pipeline: list[Any] | str,
        backend: backends.Answering | None = None,
        columns: list[str] | None = None,
        where: str | None = None,
        limit: int | None = None,
        **options: Any,
    ) -> making.Made:
        said = [{"generate": pipeline}] if isinstance(pipeline, str) else pipeline
        made = making.Making(
            source.open_source(rows, where=where, limit=limit),
            steps.pipeline(said, "test"),
            backend or backends.Answering(),
            self.directory,
            report.Silent(),
            making.Options(**options),
            columns=columns,
        )
        self.making = made
        with made.alone():
            made.check_recipes()
            made.look()
            return made.write()

    def rows(self, name: str = "data-*") -> list[Row]:
        found: list[Row] = []
        for path in sorted(self.directory.glob(f"{name}.parquet")):
            found += pq.read_table(path).to_pylist()
        return found


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    return Maker(tmp_path / "out")


def texts(*given: str | None) -> list[Row]:
    return [{"id": number, "text": text} for number, text in enumerate(given)]


def refuse(*words: str) -> Callable[[Row], str]:
    def answer(line: Row) -> str:
        text = backends.text_of(line)
        if text in words:
            raise LookupError(f"no {text}")
        return text.upper()

    return answer


def test_rows_come_with_their_outputs_in_the_order_of_the_input(make: Maker) -> None:
    made = make(texts("a", "b", "c"), "{{ text }}", job_requests=2)
    assert made.rows == 3
    assert [(row["id"], row["text"], row["output"]) for row in make.rows()] == [
        (0, "a", "A"),
        (1, "b", "B"),
        (2, "c", "C"),
    ]
    assert make.rows()[0].keys() == {
        *("id", "text", "output", "finish_reason", "prompt_tokens", "cached_tokens", "completion_tokens"),
        "latency_seconds",
    }


def test_a_row_that_cannot_be_asked_is_named_and_the_others_go_on(make: Maker) -> None:
    backend = backends.Answering(refuse("b"))
    made = make(texts("a", None, "b", "c"), "{{ text }}", backend)
    assert [row["id"] for row in make.rows()] == [0, 3]
    assert made.failed == 2
    told = [(row["row"], row["step"], row["code"], row["message"]) for row in make.rows("errors")]
    assert told == [
        (1, "generate", "row_unfit", "text is null, which the template prints"),
        (2, "generate", "made_up", "no b"),
    ]


def test_a_record_that_cannot_be_read_is_named_by_its_line(make: Maker, tmp_path: Path) -> None:
    place = tmp_path / "in.jsonl"
    place.write_text('{"text": "a"}\n{"text": \n{"text": "c"}\n')
    make(str(place), "{{ text }}")
    assert [row["output"] for row in make.rows()] == ["A", "C"]
    (fault,) = make.rows("errors")
    assert (fault["row"], fault["place"], fault["code"]) == (1, f"{place} line 2", "unreadable")


def test_the_same_again_computes_nothing(make: Maker) -> None:
    make(texts("a", "b"), "{{ text }}")
    backend = backends.Answering()
    make(texts("a", "b"), "{{ text }}", backend)
    assert backend.asked == []
    assert [row["output"] for row in make.rows()] == ["A", "B"]


def test_only_changed_and_new_rows_are_computed_again(make: Maker) -> None:
    make(texts("a", "b", "c"), "{{ text }}")
    backend = backends.Answering()
    make(texts("a", "x", "c", "d"), "{{ text }}", backend)
    assert sorted(map(backends.text_of, backend.asked)) == ["d", "x"]
    assert [row["output"] for row in make.rows()] == ["A", "X", "C", "D"]


def test_a_column_that_the_prompt_does_not_name_changes_no_output_but_is_written(make: Maker) -> None:
    make([{"text": "a", "note": 1}], "{{ text }}")
    backend = backends.Answering()
    make([{"text": "a", "note": 2}], "{{ text }}", backend)
    assert (backend.asked, make.rows()[0]["note"]) == ([], 2)


def test_failed_rows_are_tried_again_by_the_next_run(make: Maker) -> None:
    make(texts("a", "b"), "{{ text }}", backends.Answering(refuse("b")))
    backend = backends.Answering()
    make(texts("a", "b"), "{{ text }}", backend)
    assert [backends.text_of(line) for line in backend.asked] == ["b"]
    assert [row["output"] for row in make.rows()] == ["A", "B"]
    assert not make.rows("errors")


def test_another_prompt_is_refused_with_the_difference_shown(make: Maker) -> None:
    make(texts("a"), "One: {{ text }}")
    with pytest.raises(recipe.RecipeChanged) as refused:
        make(texts("a"), "Two: {{ text }}")
    assert "-user: One: {{ text }}" in str(refused.value)
    assert "+user: Two: {{ text }}" in str(refused.value)
    assert make.rows()[0]["output"] == "ONE: A"


def test_overwriting_takes_the_new_prompt_and_the_old_one_costs_nothing_to_have_back(make: Maker) -> None:
    make(texts("a"), "One: {{ text }}")
    make(texts("a"), "Two: {{ text }}", overwrite=True)
    assert make.rows()[0]["output"] == "TWO: A"
    backend = backends.Answering()
    make(texts("a"), "One: {{ text }}", backend, overwrite=True)
    assert (backend.asked, make.rows()[0]["output"]) == ([], "ONE: A")


def test_a_directory_with_something_else_in_it_is_left_alone(make: Maker) -> None:
    make.directory.mkdir()
    (make.directory / "thesis.doc").touch()
    with pytest.raises(making.NotADataset):
        make(texts("a"), "{{ text }}")


def test_a_run_that_makes_nothing_leaves_nothing(make: Maker) -> None:
    make(texts("a"), "{{ text }}")
    other = Maker(make.directory.with_name("other"))
    before = set(make.directory.parent.iterdir())
    made = making.Making(
        source.open_source(texts("a")),
        steps.pipeline([{"generate": {"prompt": "{{ text }}"}}], "test"),
        backends.Answering(),
        other.directory,
        report.Silent(),
    )
    with pytest.raises(errors.NotFound), made.alone():
        raise errors.NotFound(what="model", id="m")
    assert set(make.directory.parent.iterdir()) == before


def test_two_runs_into_one_directory_are_refused(make: Maker) -> None:
    make(texts("a"), "{{ text }}")
    with make.making.alone(), pytest.raises(making.Busy):
        make(texts("a"), "{{ text }}")


def test_samples_stand_one_after_another_and_have_seeds_of_their_own(make: Maker) -> None:
    backend = backends.Answering(lambda line: str(line["body"]["seed"]))
    make(texts("a", "b"), [{"generate": {"prompt": "{{ text }}", "samples": 3}}], backend)
    found = make.rows()
    assert [(row["id"], row["sample"]) for row in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({row["output"] for row in found}) == 6


def test_drawn_outputs_of_equal_rows_differ_and_stay_what_they_were(make: Maker) -> None:
    def answer(line: Row) -> str:
        return str(line["body"]["seed"])

    make(texts("a", "a"), "{{ text }}", backends.Answering(answer))
    first = [row["output"] for row in make.rows()]
    assert first[0] != first[1]
    backend = backends.Answering(answer)
    make(texts("a", "a", "a"), "{{ text }}", backend)
    assert len(backend.asked) == 1
    assert [row["output"] for row in make.rows()][:2] == first


def test_greedy_outputs_of_equal_rows_are_computed_once(make: Maker) -> None:
    backend = backends.Answering()
    step = {"prompt": "{{ text }}", "temperature": 0, "samples": 2}
    make(texts("a", "a"), [{"generate": step}], backend)
    assert len(backend.asked) == 1
    assert [row["output"] for row in make.rows()] == ["A"] * 4


def test_jobs_are_of_bounded_size(make: Maker) -> None:
    backend = backends.Answering()
    make(texts(*map(str, range(10))), "{{ text }}", backend, job_requests=4)
    assert backend.jobs == [4, 4, 2]


def test_several_jobs_are_under_way_where_that_is_wanted(make: Maker) -> None:
    backend = backends.Answering(window=3)
    seen: list[int] = []
    finish = backend.finish

    def finishing(job: Any, listener: Any) -> None:
        seen.append(len(backend.started) - len(seen))
        finish(job, listener)

    backend.finish = finishing  # type: ignore[method-assign]
    make(texts(*map(str, range(10))), "{{ text }}", backend, job_requests=2)
    assert max(seen) == 3
    assert [row["output"] for row in make.rows()] == [str(number) for number in range(10)]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_run_that_breaks_off_in_a_job_goes_on_with_it(make: Maker, at: int) -> None:
    broken = backends.Answering()
    finish = broken.finish

    def finishing(job: Any, listener: Any) -> None:
        if len(broken.jobs) == at:
            raise KeyboardInterrupt
        finish(job, listener)

    broken.finish = finishing  # type: ignore[method-assign]
    given = texts(*map(str, range(6)))
    with pytest.raises(KeyboardInterrupt):
        make(given, "{{ text }}", broken, job_requests=2)
    assert not make.rows()
    backend = backends.Answering()
    make(given, "{{ text }}", backend, job_requests=2)
    assert len(broken.asked) + len(backend.asked) == 6
    assert [row["output"] for row in make.rows()] == [str(number) for number in range(6)]


def test_outputs_without_their_form_are_asked_for_again_with_another_seed(make: Maker) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    def answer(line: Row) -> str:
        second = line["custom_id"].endswith("-1")
        return '{"n": 1}' if second or backends.text_of(line) == "a" else "nothing"

    backend = backends.Answering(answer)
    step = {"prompt": "{{ text }}", "schema": schema, "retries": 2, "temperature": 0}
    made = make(texts("a", "b"), [{"generate": step}], backend)
    assert [row["n"] for row in make.rows()] == [1, 1]
    assert made.invalid == 0
    first, second = (line for line in backend.asked if backends.text_of(line) == "b")
    assert "seed" not in first["body"]
    assert second["body"]["temperature"] > 0
    assert second["body"]["seed"] > 0


def test_what_stays_without_its_form_is_counted_and_kept_apart(make: Maker) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    backend = backends.Answering(lambda line: '{"n": "x"}' if backends.text_of(line) == "b" else '{"n": 2}')
    step = {"prompt": "{{ text }}", "schema": schema, "retries": 1}
    made = make(texts("a", "b"), [{"generate": step}], backend)
    assert (made.rows, made.invalid, len(backend.asked)) == (1, 1, 3)
    (apart,) = make.rows("invalid")
    assert (apart["row"], apart["output"]) == (1, '{"n": "x"}')
    assert "$.n" in apart["error"]


def test_invalid_outputs_can_stay_beside_the_others(make: Maker) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    step = {"prompt": "{{ text }}", "schema": schema, "keep_invalid": True}
    make(texts("a"), [{"generate": step}], backends.Answering(lambda line: "?"))
    (row,) = make.rows()
    assert (row["n"], row["output_text"], row["valid"]) == (None, "?", False)


def test_what_an_earlier_run_began_is_counted_once(make: Maker) -> None:
    broken = backends.Answering()
    broken.finish = lambda job, listener: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    given = texts("a", "b", "b")
    step = [{"generate": {"prompt": "{{ text }}", "temperature": 0}}]
    with pytest.raises(KeyboardInterrupt):
        make(given, step, broken)
    counts = make(given, step).steps["generate"].counts
    assert counts.done.done == 2
    assert counts.done.done + counts.resumed + counts.shared == 3


def test_invalid_outputs_that_are_kept_are_counted(make: Maker) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    step = {"prompt": "{{ text }}", "schema": schema, "keep_invalid": True}
    made = make(texts("a", "b"), [{"generate": step}], backends.Answering(lambda line: "?"))
    assert (made.rows, made.invalid) == (2, 2)


def test_rows_of_parquet_are_counted_under_a_limit(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, 3]}), tmp_path / "a.parquet")
    assert making.counted(source.open_source(tmp_path / "a.parquet", limit=2)) == 2


def test_a_cache_serves_other_directories(make: Maker, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    make(texts("a", "b"), "{{ text }}", cache=cache)
    other, backend = Maker(tmp_path / "other"), backends.Answering()
    made = other(texts("b", "c"), "{{ text }}", backend, cache=cache)
    assert [backends.text_of(line) for line in backend.asked] == ["c"]
    assert [row["output"] for row in other.rows()] == ["B", "C"]
    counts = made.steps["generate"].counts
    assert (counts.cached, counts.resumed, counts.done.done) == (1, 0, 1)


def test_columns_limit_and_where_choose_what_is_there(make: Maker) -> None:
    given = [{"id": number, "text": str(number), "extra": 0} for number in range(5)]
    make(given, "{{ text }}{{ extra }}", columns=["id"], where="id > 1", limit=2)
    assert [(row["id"], row["output"]) for row in make.rows()] == [(2, "20"), (3, "30")]
    assert "text" not in make.rows()[0]


def test_rows_in_another_order_are_written_in_their_own(make: Maker) -> None:
    given = [{"kind": "ab"[number % 2], "text": str(number)} for number in range(6)]
    backend = backends.Answering()
    make(given, "{{ kind }} {{ text }}", backend, reorder=True)
    assert [backends.text_of(line)[0] for line in backend.asked] == list("aaabbb")
    assert [row["text"] for row in make.rows()] == list("012345")


QUESTIONS = {"type": "object", "properties": {"qs": {"type": "array", "items": {"type": "string"}}}}


def chain(line: Row) -> str:
    said = backends.text_of(line)
    if said.startswith("ask"):
        return '{"qs": ["one of ' + said[4:] + '", "two of ' + said[4:] + '"]}'
    if said.startswith("rate"):
        return '{"score": ' + ("9" if "two" in said else "3") + "}"
    return f"answer to {said}"


CHAIN: list[Any] = [
    {"generate": {"name": "asking", "prompt": "ask {{ text }}", "schema": QUESTIONS}},
    {"expand": {"column": "qs", "to": "question"}},
    {"generate": {"name": "answering", "prompt": "{{ question }}"}},
    {"judge": {"prompt": "rate {{ output }}", "least": 5}},
    {"filter": "score > 5"},
    {"generate": {"name": "more", "continue": "answering", "prompt": "shorter", "output": "short"}},
]


def test_a_chain_takes_rows_through_all_its_steps(make: Maker) -> None:
    backend = backends.Answering(chain)
    made = make(texts("a", "b"), CHAIN, backend)
    found = [(row["id"], row["question"], row["output"], row["score"], row["short"]) for row in make.rows()]
    assert found == [
        (0, "two of a", "answer to two of a", 9, "answer to shorter"),
        (1, "two of b", "answer to two of b", 9, "answer to shorter"),
    ]
    assert made.dropped == {"judge": 2}
    turns = [line["body"]["messages"] for line in backend.asked if backends.text_of(line) == "shorter"]
    assert [[message["role"] for message in one] for one in turns] == [["user", "assistant", "user"]] * 2
    assert turns[0][1]["content"] == "answer to two of a"
    assert not any(name.startswith("__") for name in make.rows()[0])


def test_a_chain_again_computes_nothing_and_one_row_more_only_that(make: Maker) -> None:
    make(texts("a", "b"), CHAIN, backends.Answering(chain))
    again = backends.Answering(chain)
    make(texts("a", "b"), CHAIN, again)
    assert again.asked == []
    more = backends.Answering(chain)
    make(texts("a", "b", "c"), CHAIN, more)
    assert len(more.asked) == 6
    assert [row["id"] for row in make.rows()] == [0, 1, 2]


def test_columns_are_checked_before_the_first_token(make: Maker) -> None:
    backend = backends.Answering(chain)
    wrong = [*CHAIN[:3], {"judge": "rate {{ outptu }}"}]
    with pytest.raises(input_errors.ColumnMissing, match=r"'outptu'\. Did you mean 'output'"):
        make(texts("a"), wrong, backend)
    assert backend.asked == []


def test_slices_of_a_conversation_keep_what_the_whole_needs(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_SLICE_ROWS", 2)
    steps_ = [
        {"generate": {"name": "one", "prompt": "{{ text }}"}},
        {"generate": {"name": "two", "continue": "one", "prompt": "more", "output": "second"}},
        {"dedupe": {"column": "output"}},
    ]
    backend = backends.Answering(lambda line: str(len(line["body"]["messages"])) + backends.text_of(line)[:1])
    made = make(texts("a", "b", "c", "a", "d"), steps_, backend)
    assert [row["id"] for row in make.rows()] == [0, 1, 2, 4]
    assert made.dropped == {"dedupe": 1}
    order = [backends.text_of(line) for line in backend.asked]
    assert order == ["a", "b", "more", "more", "c", "a", "more", "more", "d", "more"]


def test_the_best_of_the_samples_is_kept(make: Maker) -> None:
    def answer(line: Row) -> str:
        said = backends.text_of(line)
        return (
            f'{{"score": {int(said[-1]) % 9 + 1}}}' if said.startswith("rate") else str(line["body"]["seed"])
        )

    pipeline = [
        {"generate": {"prompt": "{{ text }}", "samples": 4}},
        {"judge": {"prompt": "rate {{ output }}", "best": True}},
    ]
    make(texts("a", "b"), pipeline, backends.Answering(answer))
    assert [row["id"] for row in make.rows()] == [0, 1]


def test_of_rows_that_one_row_became_each_keeps_its_best_sample(make: Maker) -> None:
    def answer(line: Row) -> str:
        said = backends.text_of(line)
        return '{"score": 5}' if said.startswith("rate") else f"{said} {line['body']['seed']}"

    pipeline = [
        {"expand": {"column": "words", "to": "word"}},
        {"generate": {"prompt": "{{ word }}", "samples": 3}},
        {"judge": {"prompt": "rate {{ output }}", "best": True}},
    ]
    make([{"words": ["a", "b"]}, {"words": ["c"]}], pipeline, backends.Answering(answer))
    assert [row["word"] for row in make.rows()] == ["a", "b", "c"]


def test_a_conversation_is_the_models_though_the_input_has_columns_of_these_names(make: Maker) -> None:
    given = [{"messages": [{"role": "user", "content": "old"}], "output": "old", "text": "a"}]
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    step = {"prompt": "{{ text }}", "schema": schema}
    make(given, [{"generate": step}], backends.Answering(lambda line: '{"n": 1}'), format="messages")
    (path,) = make.directory.glob("data-*.jsonl")
    turns = orjson.loads(path.read_bytes())["messages"]
    assert [turn["content"] for turn in turns] == ["a", '{"n": 1}']


def test_times_in_nanoseconds_end_no_run(make: Maker) -> None:
    table = pa.table({"at": pa.array([1], pa.timestamp("ns"))})
    assert make(table, "{{ at }}").rows == 1


@pytest.mark.parametrize("format", ["messages", "sharegpt"])
def test_conversations_are_written_for_trainers(make: Maker, format: str) -> None:
    make(texts("a"), [{"generate": {"prompt": "{{ text }}", "system": "be {{ id }}"}}], format=format)
    (path,) = make.directory.glob("data-*.jsonl")
    assert '"be 0"' in path.read_text()
    assert '"A"' in path.read_text()


def test_a_preview_writes_no_rows_and_is_not_computed_twice(make: Maker) -> None:
    backend = backends.Answering()
    made = making.Making(
        source.open_source(texts("a", "b", "c")),
        steps.pipeline([{"generate": "{{ text }}"}], "test"),
        backend,
        make.directory,
        report.Silent(),
    )
    with made.alone():
        assert [row["output"] for row in made.preview(2)] == ["A", "B"]
    assert not make.rows()
    rest = backends.Answering()
    make(texts("a", "b", "c"), "{{ text }}", rest)
    assert [backends.text_of(line) for line in rest.asked] == ["c"]


def test_where_no_row_is_wanted_the_dataset_is_empty(make: Maker) -> None:
    made = make(texts("a"), CHAIN, where="id > 5")
    assert made.rows == 0
    assert pq.read_table(next(make.directory.glob("data-*"))).column_names[:2] == ["id", "text"]


def test_a_full_disk_breaks_the_run_off_and_the_next_one_goes_on(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = backends.Answering()

    def finish(job: Any, listener: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(job.directory))

    monkeypatch.setattr(full, "finish", finish)
    with pytest.raises(OSError, match="No space left"):
        make(texts("a"), "{{ text }}", full)
    make(texts("a"), "{{ text }}")
    assert make.rows()[0]["output"] == "A"


@pytest.mark.parametrize("left", ["", "{garbage", '{"model": "m"}'])
def test_a_damaged_recipe_says_what_to_do_and_what_is_there_is_kept(make: Maker, left: str) -> None:
    make(texts("a"), "{{ text }}")
    path = make.directory.with_name("out.longhaul") / "generate" / "recipe.json"
    path.write_text(left)
    with pytest.raises(recipe.RecipeUnreadable, match="--overwrite"):
        make(texts("a"), "{{ text }}")
    backend = backends.Answering()
    make(texts("a"), "{{ text }}", backend, overwrite=True)
    make(texts("a"), "{{ text }}", backend)
    assert not backend.asked


def test_a_recipe_is_never_there_by_half(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    make(texts("a"), "{{ text }}")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        make(texts("a"), "{{ text }} {{ text }}", overwrite=True)
    monkeypatch.undo()
    make(texts("a"), "{{ text }}")


def test_a_filter_by_expression_and_text_is_one_step(make: Maker) -> None:
    both = {"where": "id > 0", "column": "text", "min_chars": 2}
    made = make(texts("aa", "b", "cc"), [{"filter": both}, {"generate": "{{ text }}"}])
    assert made.dropped == {"filter": 2}
    assert [row["output"] for row in make.rows()] == ["CC"]


def test_outputs_never_stand_beside_rows_that_took_the_place_of_theirs(make: Maker, tmp_path: Path) -> None:
    place = tmp_path / "in.jsonl"
    place.write_text('{"text": "a"}\n')

    def answer(line: Row) -> str:
        place.write_text('{"text": "b"}\n')
        os.utime(place, (1, 1))  # back in time
        return backends.text_of(line).upper()

    with pytest.raises(input_errors.InputChanged, match=r"in\.jsonl changed"):
        make(place, "{{ text }}", backends.Answering(answer))
    assert make.rows() == []
    make(place, "{{ text }}")
    assert [(row["text"], row["output"]) for row in make.rows()] == [("b", "B")]


@pytest.mark.parametrize("window", [1, 3])
def test_requests_of_a_job_that_a_later_run_ends_count_once(make: Maker, window: int) -> None:
    def stop(line: Row) -> str:
        if backends.text_of(line) == "3":
            raise KeyboardInterrupt
        return "x"

    given = texts(*map(str, range(8)))
    with pytest.raises(KeyboardInterrupt):
        make(given, "{{ text }}", backends.Answering(stop, window), job_requests=2, cache=None)
    made = make(given, "{{ text }}", backends.Answering(window=window), job_requests=2)
    told = made.steps["generate"]
    assert (told.counts.resumed, told.counts.shared, told.counts.done.done, told.left()) == (2, 0, 6, 0)


def test_the_first_step_of_a_conversation_expects_all_rows_from_the_first_slice_on(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "_SLICE_ROWS", 2)
    expected: list[int] = []

    def answer(line: Row) -> str:
        expected.append(make.making.made.steps["a"].expected)
        return "x"

    chain = [{"generate": {"name": "a", "prompt": "{{ text }}", "samples": 2}}]
    chain.append({"generate": {"name": "b", "prompt": "More.", "continue": "a", "output": "b"}})
    make(texts("1", "1", "1", "2", "3"), chain, backends.Answering(answer))
    assert set(expected) == {10}
    assert {name: step.expected for name, step in make.making.made.steps.items()} == {"a": 10, "b": 10}
    assert len(make.rows()) == 10
