"""Completion in real shells: commands, options, and ids of jobs from a server that answers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_completion import IDS, server  # noqa: F401

ROOT = Path(__file__).parents[2]


@pytest.fixture
def longhaul(tmp_path: Path) -> dict[str, str]:
    """An environment in which `longhaul` is this checkout's."""
    program = tmp_path / "bin" / "longhaul"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom jobs.entry import main\nmain()\n")
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def _in_bash(environment: dict[str, str], *lines: tuple[str, ...]) -> list[set[str]]:
    """Return what bash offers for the last word of each line."""
    script = 'eval "$(longhaul completion bash 2>/dev/null)"'
    for words in lines:
        script += f"; COMPREPLY=(); COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        script += "; _longhaul_completion longhaul; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stderr == ""
    return [set(line.split()) for line in done.stdout.splitlines()]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash: apt-get install bash")
@pytest.mark.timeout(120)
def test_bash_completes_commands_options_and_ids(longhaul: dict[str, str], server: str) -> None:  # noqa: F811
    given = longhaul | {"LONGHAUL_API_URL": server, "LONGHAUL_API_KEY": "key-of-mine"}
    commands, all_, options, ids, reports = _in_bash(
        given,
        ("longhaul", "st"),
        ("longhaul", "''"),
        ("longhaul", "submit", "--m"),
        ("longhaul", "status", "batch_01a"),
        ("longhaul", "report", "batch_01b"),
    )
    assert commands == {"status"}
    assert {"run", "size", "quantize"} <= all_, "those of plugins, too"
    assert options == {"--metadata"}
    assert ids == {IDS[0]}
    assert reports == {IDS[1]}


@pytest.mark.parametrize(
    ("shell", "check"),
    [("zsh", ["zsh", "-f", "-c", "autoload -Uz compinit && compinit -u; {}; whence _longhaul_completion"]),
     ("fish", ["fish", "--no-config", "-c", "{}; complete -C 'longhaul statu'"])],
)  # fmt: skip
@pytest.mark.timeout(120)
def test_other_shells_take_their_line(longhaul: dict[str, str], shell: str, check: list[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}: apt-get install {shell}")
    line = subprocess.run(
        ["longhaul", "completion", shell], env=longhaul, capture_output=True, text=True, check=True
    ).stdout.strip()
    command = [part.replace("{}", line) for part in check]
    done = subprocess.run(command, env=longhaul, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("_longhaul_completion" if shell == "zsh" else "status")
