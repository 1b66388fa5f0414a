"""docs/parameters.md covers every parameter, and the tests it names exist."""

import ast
import json
import re
from functools import cache
from pathlib import Path

import pytest

from jobs import bodies

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parameters.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
REFUSED = SECTIONS.pop("Refused at every endpoint")
SECTIONS.pop("Examples")
ROW = re.compile(r"^\| `(\w+)` \| (honoured|no effect|refused) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def _rows(endpoint: str) -> list[str]:
    """Return the parameters that the tables of an endpoint list."""
    titles = [title for title in SECTIONS if endpoint in title.split(" and ")]
    return [name for title in titles for name, _, _ in ROW.findall(SECTIONS[title])]


@cache
def _functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("endpoint", bodies.BODIES)
def test_each_parameter_of_an_endpoint_has_one_row(endpoint: str) -> None:
    assert sorted(_rows(endpoint)) == sorted(bodies.BODIES[endpoint].model_fields)


def test_each_row_is_read_and_names_a_test() -> None:
    lines = [line for text in SECTIONS.values() for line in text.splitlines() if line.startswith("| `")]
    rows = [row for text in SECTIONS.values() for row in ROW.findall(text)]
    assert len(rows) == len(lines)
    assert [name for name, _, tests in rows if not TEST.search(tests)] == []


def test_each_refused_name_is_listed_with_its_reason() -> None:
    listed = {}
    for names, reason in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|$", REFUSED, re.MULTILINE):
        listed |= dict.fromkeys(re.findall(r"`(\w+)`", names), reason)
    assert listed == bodies.REFUSED


def test_each_test_on_the_page_exists() -> None:
    named = TEST.findall(PAGE)
    assert len(named) > 50
    assert [(path, name) for path, name in named if name not in _functions(path)] == []


@pytest.mark.parametrize("line", re.findall(r"```json\n(.*?)\n```", PAGE))
def test_each_example_is_a_request(line: str) -> None:
    request = json.loads(line)
    assert bodies.read(request["url"], request["body"])
