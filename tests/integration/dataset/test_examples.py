"""What docs/datasets.md says to type does what it says: the examples as they stand, smaller or in full."""

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.dataset import steps
from worker.engine import smollm2

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "datasets.md").read_text()
EXAMPLES = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "examples/rows.py" in block]
NAMES = ("humaneval", "lines", "readmes")
OUTPUTS = {"humaneval": "solutions", "lines": "kinds", "readmes": "questions"}
SMALL = {
    "humaneval": ["--limit", "2", "--max-tokens", "32"],
    "lines": ["--limit", "16"],
    "readmes": ["--limit", "1"],
}
PROGRAM = "from jobs import entry; entry.main()"


class Example:
    """One example in a directory of its own, with what its command left there."""

    def __init__(self, name: str, directory: Path, more: list[str]) -> None:
        self.name, self.directory = name, directory
        self.output = directory / OUTPUTS[name]
        (directory / "examples").symlink_to(ROOT / "examples")
        # A newer option goes over an older one.
        self._script = EXAMPLES[NAMES.index(name)].rstrip() + " " + shlex.join(more)

    def run(self) -> int:
        """Run the page's commands; return the exit code of the last one."""
        own = shlex.join([sys.executable, "-c", PROGRAM])
        script = f'longhaul() {{ {own} "$@"; }}\npython() {{ {shlex.quote(sys.executable)} "$@"; }}\n'
        run = subprocess.run(
            ["bash", "-c", script + self._script],
            cwd=self.directory,
            env=os.environ | {"PYTHONPATH": str(ROOT), "MODEL": str(smollm2.ensure())},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert run.returncode in (0, 3), run.stderr
        return run.returncode

    @property
    def input(self) -> list[dict[str, Any]]:
        lines = (self.directory / f"{self.name}.jsonl").read_bytes().splitlines()
        return [orjson.loads(line) for line in lines]

    @property
    def rows(self) -> pa.Table:
        return pq.read_table(sorted(self.output.glob("data-*.parquet")))

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = orjson.loads((self.output / "summary.json").read_bytes())
        return found


def check_humaneval(made: Example, count: int) -> None:
    rows, summary = made.rows.to_pylist(), made.summary
    assert len(rows) + summary["dropped"].get("dedupe", 0) == 4 * count
    assert len({row["output"].strip() for row in rows}) == len(rows)
    order = [task["task_id"] for task in made.input]
    assert [(order.index(row["task_id"]), row["sample"]) for row in rows] == sorted(
        (order.index(row["task_id"]), row["sample"]) for row in rows
    )
    assert {"prompt", "entry_point", "output", "finish_reason", "completion_tokens"} <= rows[0].keys()
    assert "test" not in rows[0]
    assert not any("\ndef" in row["output"] for row in rows)


def check_lines(made: Example, count: int) -> None:
    rows, schema = made.rows.to_pylist(), orjson.loads((ROOT / "examples" / "line.json").read_bytes())
    assert len(rows) + made.summary["invalid"] == count
    assert len(rows) >= 0.8 * count
    for row in rows:
        jsonschema.validate({name: row[name] for name in schema["properties"]}, schema)
    lines = [line["line"] for line in made.input[:count]]
    assert len(set(lines)) == count
    missing = set(lines) - {row["line"] for row in rows}
    if missing:
        kept_apart = pq.read_table(made.output / "invalid.parquet").to_pylist()
        assert {orjson.loads(one["input"])["line"] for one in kept_apart} == missing


def check_readmes(made: Example, count: int) -> None:
    rows, summary = made.rows.to_pylist(), made.summary
    asked = Counter(row["package"] for row in rows)
    assert 0 < len(asked) <= count
    assert max(asked.values()) <= 3
    assert len({row["question"] for row in rows}) == len(rows)
    assert all(5 <= row["score"] <= 10 and len(row["answer"]) >= 20 for row in rows)
    given = {one["package"] for one in made.input if len(one["readme"]) > 500 and one["readme"][:2] != "<%"}
    assert asked.keys() <= given
    assert list(summary["steps"]) == ["ask", "answer", "judge"]
    assert "readme" not in rows[0]


CHECKS = {"humaneval": check_humaneval, "lines": check_lines, "readmes": check_readmes}


def check_again(made: Example, code: int) -> None:
    """The same command a second time computes nothing, and leaves the same rows."""
    before = made.rows
    assert made.run() == code
    assert [step["requests"] for step in made.summary["steps"].values()] == [0] * len(made.summary["steps"])
    assert made.rows.equals(before)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_example_of_the_page_works(name: str, tmp_path: Path) -> None:
    made = Example(name, tmp_path, SMALL[name])
    code = made.run()
    CHECKS[name](made, int(SMALL[name][1]))
    check_again(made, code)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
def test_example_of_the_page_works_in_full(name: str, tmp_path: Path) -> None:
    made = Example(name, tmp_path, [])
    code = made.run()
    CHECKS[name](made, {"humaneval": 164, "lines": 2000, "readmes": len(made.input)}[name])
    check_again(made, code)


def test_each_example_is_on_the_page() -> None:
    assert len(EXAMPLES) == len(NAMES)
    for name, block in zip(NAMES, EXAMPLES, strict=True):
        assert f"rows.py {name} > {name}.jsonl" in block
        assert f"-o {OUTPUTS[name]}" in block


def test_yaml_and_python_of_the_page_are_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat, pipeline = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "chat.yaml").write_text(chat)
    (tmp_path / "steps.yaml").write_text(pipeline)
    assert steps.read_messages(tmp_path / "chat.yaml")[0].role == "system"
    kinds = [step.kind for step in steps.read(tmp_path / "steps.yaml").steps]
    assert set(kinds) == {"generate", "judge", "filter", "expand", "dedupe"}
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(program, {"MODEL": str(smollm2.ensure()), "__name__": "page"})
    assert "'language'" in capsys.readouterr().out
