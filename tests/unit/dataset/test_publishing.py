"""What is told of a finished run: a summary, a card, and lines."""

from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from jobs.dataset import calling, making, publishing, report, steps
from jobs.dataset.input import source
from tests.unit.dataset import backends

SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}}}


def made(directory: Path, *said: dict[str, Any], **asked: Any) -> tuple[making.Making, calling.Asked]:
    rows = [{"id": n, "text": f"text {n % 3}"} for n in range(4)]
    run = calling.Asked(
        rows, directory, "m", steps.pipeline(said, "test"), command=("longhaul", "generate", "x"), **asked
    )
    backend = backends.Answering(lambda line: ValueError("lost") if "2" in backends.text_of(line) else "5")
    making_ = making.Making(
        source.open_source(run.place), run.pipeline, backend, directory, report.Silent(), run.options
    )
    with making_.alone():
        making_.write()
    return making_, run


def test_a_summary_counts_rows_steps_tokens_and_what_it_cost(tmp_path: Path) -> None:
    options = making.Options(cost_per_hour=3600.0)
    run, asked = made(tmp_path / "out", {"generate": "{{ text }}"}, {"dedupe": "exact"}, options=options)
    run.made.steps["generate"].counts.seconds = 2.0
    summary = publishing.publish(run, asked)
    assert summary == orjson.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert (summary["rows"], summary["failed"], summary["invalid"]) == (1, 1, 0)
    assert summary["dropped"] == {"dedupe": 2}
    (why,) = summary["reasons"]
    assert (why["message"], why["count"], why["place"]) == ("lost", 1, "the table row 2")
    step = summary["steps"]["generate"]
    assert (step["rows"], step["requests"], step["failed"]) == (4, 4, 1)
    assert (step["prompt_tokens"], step["cached_tokens"], step["completion_tokens"]) == (9, 3, 6)
    assert step["output_tokens_per_second"] == 3.0
    assert summary["cost"] == 2.0
    assert {file["name"] for file in summary["files"]} == {"data-00000.parquet", "errors.parquet"}
    assert not list((tmp_path / "out").glob(".summary*"))


def test_a_card_holds_the_whole_recipe_and_the_schema_itself_not_its_place(tmp_path: Path) -> None:
    place = tmp_path / "form.json"
    place.write_bytes(orjson.dumps(SCHEMA))
    step = {
        "prompt": "Rate {{ text }}",
        "system": "Be fair.",
        "schema": str(place),
        "max_tokens": 7,
        "seed": 3,
    }
    run, asked = made(tmp_path / "out", {"generate": step}, where=None, limit=9)
    publishing.publish(run, asked)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert yaml.safe_load(card.split("---")[1])["configs"]
    for part in ("Rate {{ text }}", "Be fair.", '"score"', "max_tokens", "longhaul generate x"):
        assert part in card
    assert "form.json" not in card
    assert str(tmp_path) not in card


def test_a_card_of_several_steps_holds_each_of_them(tmp_path: Path) -> None:
    run, asked = made(
        tmp_path / "out",
        {"generate": {"prompt": "{{ text }}", "schema": SCHEMA}},
        {"filter": "score > 1"},
        {"dedupe": {"column": "text", "near": 0.5}},
    )
    publishing.publish(run, asked)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    for part in ('"generate": {', '"score"', '"where": "score > 1"', '"near": 0.5'):
        assert part in card


SUMMARY: dict[str, Any] = {
    "directory": "out",
    "rows": 1234,
    "failed": 2,
    "invalid": 0,
    "dropped": {"where": 1000},
    "reasons": [{"code": "row_unfit", "message": "a is null", "count": 2, "place": "a.csv line 7"}],
    "steps": {
        "ask": {
            "requests": 1500,
            "resumed": 20,
            "from_cache": 0,
            "prompt_tokens": 5000,
            "cached_tokens": 4000,
            "completion_tokens": 300,
            "seconds": 61.2,
            "output_tokens_per_second": 4.9,
            "latency_seconds": {"p50": 0.5, "p90": 1.25, "p99": 2.0},
        }
    },
    "worker_hours": 0.017,
    "cost": 0.0425,
    "files": [{"name": "data-00000.parquet"}],
}


def test_lines_say_what_the_summary_says() -> None:
    assert publishing.lines(SUMMARY) == [
        "1,234 rows in out",
        "  2 failed, 1,000 left out by where",
        "    2 row_unfit: a is null (a.csv line 7)",
        "  ask: 1,500 requests (20 of an earlier run beside them), 5,000 prompt tokens (4,000 cached),"
        " 300 output tokens in 1m01s, 4.9/s",
        "    seconds a request: p50 0.50, p90 1.25",
        "  0.017 worker-hours, cost 0.04",
        "  out/data-00000.parquet",
    ]


def test_lines_tell_of_five_reasons_and_how_many_there_are_beside_them() -> None:
    found = [{"code": f"c{n}", "message": "", "count": 9 - n, "place": ""} for n in range(7)]
    said = publishing.lines(SUMMARY | {"reasons": found})
    assert said[2:8] == [
        *(f"    {9 - n} c{n}" for n in range(5)),
        "    7 for other reasons, which the files below name",
    ]


@pytest.mark.parametrize("cost", [None, 0.0])
def test_what_is_not_known_is_not_said_and_what_costs_nothing_is(cost: float | None) -> None:
    step = SUMMARY["steps"]["ask"] | {
        "output_tokens_per_second": None,
        "latency_seconds": {"p50": None, "p90": None, "p99": None},
    }
    said = publishing.lines(
        SUMMARY | {"failed": 0, "dropped": {}, "reasons": [], "steps": {"ask": step}, "cost": cost}
    )
    assert len(said) == 4
    assert ("cost 0.00" in said[2]) == (cost is not None)
