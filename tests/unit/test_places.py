"""Places that cannot be written are refused by every command, before anything is loaded or asked for."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs import cli, errors, places
from tests.unit.test_help import COMMANDS

PROMPT = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'
ARGUMENTS = {
    "generate": ("IN", "--model", "/no/model", "--prompt", "{{ text }}"),
    "quantize": ("/no/model",),
    "report": ("batch_1", "--url", "http://127.0.0.1:9"),
    "results": ("batch_1", "--url", "http://127.0.0.1:9"),
    "run": ("IN", "--model", "/no/model"),
}


def test_every_command_that_writes_is_tried() -> None:
    writes = {name for name, one in COMMANDS.items() if any("-o" in option.opts for option in one.params)}
    assert writes == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("place", ["/proc/o.jsonl", "FILE/o.jsonl"])
def test_a_place_that_cannot_be_written_is_told_first(name: str, place: str, tmp_path: Path) -> None:
    source, file = tmp_path / "in.jsonl", tmp_path / "file"
    source.write_text(PROMPT)
    file.touch()
    place = place.replace("FILE", str(file)).replace(".jsonl", ".html" if name == "report" else ".jsonl")
    given = [str(source) if word == "IN" else word for word in ARGUMENTS[name]]
    done = CliRunner().invoke(cli.main, [name, *given, "-o", place])
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith(f"longhaul: {place} cannot be written: no file can be made in ")
    assert line.endswith("Name another with -o.")
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "file"}


def test_directories_that_are_to_be_made_are_looked_at_where_they_begin(tmp_path: Path) -> None:
    places.check(tmp_path / "a" / "b" / "c.jsonl")
    places.check(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(errors.InvalidRequest, match=r"in /proc .*--png"):
        places.check(Path("/proc/a/b"), "--png")


@pytest.mark.parametrize("name", ["loop", "loop/o", "x" * 300])
def test_links_in_a_circle_and_names_that_are_too_long_are_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(places.CannotWrite, match="cannot be written"):
        places.check(tmp_path / name)
