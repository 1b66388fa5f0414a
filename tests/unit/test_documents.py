"""What the documents tell people to type exists, and what they list is all there is."""

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from jobs import cli, key_commands
from worker import offline, quantize_command, sizing_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "infra" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_WORKERS = {"run": offline.run, "size": sizing_command.size, "quantize": quantize_command.quantize}
BY_NAME = cli.main.commands | OF_WORKERS
COMMANDS = [cli.main, *BY_NAME.values(), *key_commands.keys.commands.values()]
EXAMPLE_FILES = ("examples/questions.yaml", "examples/prompts.jsonl")
HELP = "\n".join(command.help or "" for command in COMMANDS)
TEXT = "\n".join(page.read_text() for page in PAGES)


def shell_lines() -> list[str]:
    """Return the command lines of the documents' sh blocks and of the examples in --help."""
    blocks = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    whole = "\n".join([*blocks, HELP]).replace("\\\n", " ")
    lines = [line.strip() for line in whole.splitlines()]
    return sorted({line.split(" | ")[-1 if line.startswith("make-prompts") else 0] for line in lines})


EXAMPLES = [line for line in shell_lines() if line.startswith("longhaul ")]


@pytest.mark.parametrize("line", EXAMPLES)
def test_command_line_is_one_that_longhaul_takes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    for file in (
        "prompts.jsonl",
        "prompts.txt",
        "ask.jinja",
        "examples/questions.yaml",
        "examples/prompts.jsonl",
    ):
        Path(file).touch()
    name, *arguments = _one_command(line)[1:]
    command = BY_NAME[name]
    if isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)


def _one_command(line: str) -> list[str]:
    """Return the words of a line's first command."""
    words = shlex.split(line.replace("batch_01...", "batch_01"), comments=True)
    return list(itertools.takewhile(lambda word: word not in ("&&", "|", ">", ">>"), words))


def test_the_request_of_the_readme_is_the_first_of_the_examples() -> None:
    (request,) = re.findall(r"```json\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert (ROOT / "examples" / "prompts.jsonl").read_text().startswith(request)


def test_examples_are_found() -> None:
    assert len(EXAMPLES) > 15


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert named
    assert named <= targets


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^):]+)\)", page.read_text()):
            assert (page.parent / target.partition("#")[0]).exists(), f"{page.name}: {target}"


def test_architecture_lists_every_redis_key() -> None:
    layout = (ROOT / "jobs" / "ledger.lua").read_text().split("\n--@")[0]
    keys = {*re.findall(r"^--   ([a-z_]+)", layout, re.MULTILINE), *re.findall(r"\b([a-z_]+):<", layout)}
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert len(keys) > 20
    assert {key for key in keys if not re.search(rf"`{key}[:<`]", page)} == set()


def test_readme_python_block_is_complete() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    compile(block, "README.md", "exec")
