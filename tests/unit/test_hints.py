"""What is told to be typed is what a shell takes."""

import subprocess
from pathlib import Path

import pytest

from jobs import doctor_server, hints, top_view


def test_a_shell_has_the_variables_and_the_model(tmp_path: Path) -> None:
    place = tmp_path / "it's here"
    place.mkdir()
    (place / "environment").write_text("LONGHAUL_REDIS_URL=redis://x\n")
    line = hints.worker("a b", place).replace("celery -A worker worker", "env")
    printed = subprocess.run(["sh", "-c", line], check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    assert {"LONGHAUL_REDIS_URL=redis://x", "LONGHAUL_MODEL=a b"} <= set(printed)


def test_doctor_names_the_directory_that_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGHAUL_MODEL", raising=False)
    (one,) = doctor_server.workers([], ["a"], Path(".longhaul"))
    assert one.advice.endswith(": set -a; . .longhaul/environment; set +a; celery -A worker worker")
    (several,) = doctor_server.workers([], ["a", "b"])
    assert "'LONGHAUL_MODEL=all celery -A worker worker' on a GPU node" in several.advice
    monkeypatch.setenv("LONGHAUL_MODEL", "a")
    (told,) = doctor_server.workers([], ["a", "b"])
    assert "'celery -A worker worker' on a GPU node" in told.advice


def test_a_narrow_terminal_has_the_command() -> None:
    assert "'celery -A worker worker'" in str(top_view.workers_table([], 80))[:80]
