"""One event is one line of JSON, whatever it carries."""

import io
import json
import logging

from jobs import log


def _lines(**extra: object) -> list[str]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log.JsonLines())
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
