"""What a new user meets: every command's help, its examples, and what mistakes are answered with."""

import errno
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from jobs import cli, servers

NO_TABLE = {
    *("completion", "keys create", "keys revoke", "quantize", "up"),
    *("queue-keys", "recover"),  # names alone, one a line
}
_ENDS = ("|", ">", ">>", "&&", ";")


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


def _examples(name: str, command: click.Command) -> list[list[str]]:
    """Return the arguments that the help of a command shows it with."""
    found = []
    for row in (command.help or "").splitlines():
        before, called, after = row.partition(f"longhaul {name}")
        if called and not before.endswith("'"):  # else it is spoken of
            words = shlex.split(after, comments=True)
            ends = [place for place, word in enumerate(words) if word in _ENDS or word.endswith((";", ")"))]
            found.append(words[: min(ends, default=len(words))])
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_whose_options_there_are(name: str) -> None:
    command = COMMANDS[name]
    examples = _examples(name, command)
    assert examples, f"the help of {name} has no example"
    for arguments in examples:
        context = click.Context(command, info_name=name)
        command.make_parser(context).parse_args(list(arguments))  # raises NoSuchOption


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
        assert not servers.is_free(port)
        place = tmp_path / "up"
        done = CliRunner().invoke(
            cli.main, ["up", "--model", "a=b", "--port", str(port), "--dir", str(place)]
        )
    assert done.exit_code == 1
    assert f"Port {port} is taken" in done.output
    assert not place.exists()
