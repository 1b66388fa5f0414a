"""Any text inside Markdown: it stays what it is, ends no fence, opens no table cell, is no HTML."""

import re
from collections.abc import Iterable, Sequence

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def fenced(text: str, language: str = "") -> str:
    """Return a code block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, _longest_run(text) + 1)
    clean = _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))
    return f"{fence}{language}\n{clean}\n{fence}"


def code(text: str) -> str:
    """Return a code span on one line, which may stand in a table."""
    line = _line(text)
    ticks = "`" * (_longest_run(line) + 1)
    space = " " if line.startswith("`") or line.endswith("`") or not line else ""
    return f"{ticks}{space}{line}{space}{ticks}".replace("|", "\\|")


def words(text: str) -> str:
    """Return a text on one line without any markup."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&!$])", r"\\\1", _line(text))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _line(text: str) -> str:
    return _CONTROL.sub("\ufffd", " ".join(text.split()))


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
