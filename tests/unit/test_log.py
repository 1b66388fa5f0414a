"""One event is one line of JSON, whatever it carries."""

import io
import json
import logging
import math
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jobs import log, masking


def _lines(formatter: logging.Formatter | None = None, **extra: object) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter or log.JsonLines())
    logger = logging.Logger("worker.test")
    logger.addHandler(handler)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("it %s", "broke\nbadly", extra=extra)
    return stream.getvalue().splitlines()


def test_an_event_with_a_traceback_and_newlines_is_one_line() -> None:
    (line,) = _lines(job="batch_1", path=object())
    event = json.loads(line)
    assert event["event"] == "it broke\nbadly"
    assert (event["level"], event["logger"], event["job"]) == ("error", "worker.test", "batch_1")
    assert "ValueError" in event["exception"]
    assert event["time"].endswith("Z")


def test_events_inside_of_a_job_carry_its_id_whatever_module_they_are_of() -> None:
    with log.about(job="batch_1", unit="plan"), log.about(unit="feed"):
        (line,) = _lines(attempts=2)
        (own,) = _lines(job="batch_2")
    (after,) = _lines()
    event = json.loads(line)
    assert (event["job"], event["unit"], event["attempts"]) == ("batch_1", "feed", 2)
    assert json.loads(own)["job"] == "batch_2"
    assert "job" not in json.loads(after)


def test_as_text_an_event_is_a_line_with_its_fields_and_its_traceback_follows() -> None:
    first, *rest = _lines(log.TextLines(), job="batch_1", rows=[1, 2])
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT[\d:.]{12}Z error    it broke badly \[worker\.test\] job="batch_1" rows=\[1, 2\]',
        first,
    )
    assert rest[0] == "Traceback (most recent call last):"


def test_secrets_are_masked_in_text_and_json() -> None:
    masking.learn(["a-secret-of-this-test"])
    for formatter in (log.TextLines(), log.JsonLines()):
        assert "a-secret-of" not in "".join(_lines(formatter, url="redis://:a-secret-of-this-test@h"))


class NoText:
    def __str__(self) -> str:
        raise ValueError("no")


ITSELF: dict[str, object] = {}
ITSELF["itself"] = ITSELF


@pytest.mark.parametrize(
    "value", [math.inf, {"a": [math.nan]}, {(1, 2): 3}, {b"a": 1}, ITSELF, NoText(), [NoText()], b"\n"]
)
def test_what_is_no_json_does_not_keep_an_event_from_being_told(value: object) -> None:
    (line,) = _lines(value=value, job="batch_1")
    event = json.loads(line, parse_constant=pytest.fail)
    assert (event["job"], event["event"]) == ("batch_1", "it broke\nbadly")
    assert event["value"]
    first, *_ = _lines(log.TextLines(), value=value, job="batch_1")
    assert 'job="batch_1"' in first


def test_a_text_that_its_arguments_do_not_fit_is_told() -> None:
    record = logging.LogRecord("library", logging.WARNING, "x.py", 1, "%d of %s", ("one",), None)
    assert json.loads(log.JsonLines().format(record))["event"] == "%d of %s ('one',)"


def test_half_a_surrogate_pair_gets_into_a_file(tmp_path: Path) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook
    try:
        log.setup(path=str(tmp_path / "log"))
        logging.getLogger("worker").warning("half \ud83d", extra={"name_of": "\xe9"})
        line = (tmp_path / "log").read_bytes()
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = before
        root.setLevel(level)
        logging.captureWarnings(False)
        sys.excepthook, threading.excepthook = hooks
    event = json.loads(line)
    assert (event["event"], event["name_of"]) == ("half \ud83d", "\xe9")


def test_a_command_shows_warnings_with_their_fields() -> None:
    code = (
        "from click.testing import CliRunner; from jobs import cli, log; import logging, sys;"
        "cli.main.main(['queue-keys'], standalone_mode=False);"
        "logging.getLogger('worker.x').warning('slower', extra={'reason': 'no kernel', 'rows': 3});"
        "logging.getLogger('worker.x').info('not shown')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == 'longhaul: slower reason="no kernel" rows=3'
