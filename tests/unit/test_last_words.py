"""Of a log for programs a person is shown why its process ended."""

import logging
import sys

import pytest

from jobs import last_words, log


def event(level: int, text: str, form: str = "json", **fields: object) -> str:
    record = logging.makeLogRecord({"name": "worker.x", "levelno": level, "msg": text} | fields)
    record.levelname = logging.getLevelName(level)
    return log.FORMATS[form]().format(record)


def test_what_a_process_says_of_its_own_end_comes_first() -> None:
    lines = [event(40, "model not loaded", reason="x"), "longhaul: No such model.", event(20, "stopped")]
    assert last_words.of("\n".join(lines)) == "No such model."


@pytest.mark.parametrize(
    ("fields", "said"),
    [({}, "it broke"), ({"reason": "no room"}, "it broke: no room"), ({"error": "no"}, "it broke: no")],
)
def test_else_it_is_the_last_error_in_words(fields: dict[str, object], said: str) -> None:
    lines = [event(40, "an earlier one"), event(40, "it broke", **fields), event(20, "draining")]
    assert last_words.of("\n".join(lines)) == said


def test_of_a_traceback_the_last_line_counts() -> None:
    try:
        raise ValueError("no such number")
    except ValueError:
        said = last_words.of(event(50, "uncaught", exc_info=sys.exc_info()))
    assert said == "uncaught: ValueError: no such number"


def test_else_they_are_the_last_lines_without_json() -> None:
    said = last_words.of("\n".join([*"abcdef", event(20, "loading"), "Killed"]))
    assert said.split("\n  ") == ["", "d", "e", "f", "loading", "Killed"]
    assert "{" not in said


@pytest.mark.parametrize(
    ("output", "said"), [("", "it said nothing"), ("{not json\n", "{not json"), ("[1]\n", "[1]")]
)
def test_a_log_of_others_is_shown_as_it_is(output: str, said: str) -> None:
    assert last_words.of(output) == said
