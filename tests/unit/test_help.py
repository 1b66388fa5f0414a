"""What a new user meets: every command's help, its examples, and what mistakes are answered with."""

import errno
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from jobs import cli, ports

NO_TABLE = {
    *("completion", "keys create", "keys revoke", "quantize", "up"),
    *("queue-keys", "recover"),  # names alone, one a line
}


def _leaves(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        assert command is not None
        if isinstance(command, click.Group):
            inner = click.Context(command, parent=context, info_name=name)
            yield from ((f"{name} {leaf}", found) for leaf, found in _leaves(command, inner))
        else:
            yield name, command


COMMANDS = dict(_leaves(cli.main, click.Context(cli.main, info_name="longhaul")))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name: str) -> None:  # test_documents tries them
    told = COMMANDS[name].help or ""
    assert re.search(rf"^(.*[ (])?longhaul {name}\b", told, re.MULTILINE), told


@pytest.mark.parametrize("name", COMMANDS)
def test_what_prints_a_table_prints_json_too(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert ("--json" in options) != (name in NO_TABLE)


def test_the_list_of_commands_tells_each_in_a_whole_line() -> None:
    shown = CliRunner().invoke(cli.main, ["--help"], terminal_width=80).output
    _, _, listed = shown.partition("Commands:\n")
    assert "..." not in listed
    assert {row.split()[0] for row in listed.splitlines() if row.strip()} >= {"top", "doctor", "run"}


def test_without_arguments_the_help_is_shown() -> None:
    assert "Commands:" in CliRunner().invoke(cli.main, []).output


@pytest.mark.parametrize(
    ("typed", "meant"), [(["statu", "x"], "status"), (["status", "--jsn", "x"], "--json"), (["tpo"], "top")]
)
def test_what_is_misspelt_is_answered_with_what_was_meant(typed: list[str], meant: str) -> None:
    done = CliRunner().invoke(cli.main, typed)
    assert done.exit_code == 2
    assert f"Did you mean '{meant}'?" in done.output


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "Make room"), (errno.EACCES, "Let this user"), (errno.EIO, "place: ")],
)
def test_what_the_system_refuses_is_one_line(number: int, words: str, tmp_path: Path) -> None:
    @click.command()
    def fails() -> None:
        raise OSError(number, "said the system", "place")

    done = CliRunner().invoke(cli.Commands("longhaul", commands={"fails": fails}), ["fails"])
    assert done.exit_code == 1
    assert done.output.startswith("longhaul: place: said the system.")
    assert words in done.output
    assert len(done.output.splitlines()) == 1


def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not ports.is_free(port)
        place = tmp_path / "up"
        done = CliRunner().invoke(
            cli.main, ["up", "--model", "a=b", "--port", str(port), "--dir", str(place)]
        )
    assert done.exit_code == 1
    assert f"Port {port} is taken" in done.output
    assert not place.exists()
