"""Where the command begins."""

import io

from jobs import entry


def test_a_terminal_without_utf8_is_shown_a_question_mark() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, "ascii")
    entry.bear_any_text(stream)
    print("\N{BOX DRAWINGS HEAVY HORIZONTAL}a\N{HORIZONTAL ELLIPSIS}", file=stream, flush=True)
    assert written.getvalue() == b"?a?\n"


def test_a_stream_that_is_closed_stays_so() -> None:
    entry.bear_any_text(None)
