"""What `longhaul up` says of models and workers, and which settings it leaves for other commands."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from jobs import cli, errors, servers, stack, stack_lines

MODELS = {"a": {"source": "x/a"}, "b": {"source": "x/b"}}


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGHAUL_MODEL", raising=False)


@pytest.mark.parametrize(
    ("model", "names"),
    [("all", ["a", "b", "c,d"]), ("b,a", ["a", "b"]), ("c,d", ["c,d"]), ("none", []), ("b", ["b"])],
)
def test_models_of_a_worker_are_those_that_the_setting_means(model: str, names: list[str]) -> None:
    assert stack_lines.chosen(model, ["a", "b", "c,d"]) == names


def test_a_model_that_no_worker_runs_is_named() -> None:
    assert "nobody runs b: its requests wait" in stack_lines.workers([1], "a", ["a", "b"])
    two = "2 workers, pid 1 and 2: each takes turns over a and b"
    assert stack_lines.workers([1, 2], "all", ["a", "b"]) == two
    none = stack_lines.workers([], "all", ["a", "b"])
    assert none.startswith("none\nnobody runs a or b: ")
    assert stack_lines.workers([1], "all", ["a"]) == "1 worker, pid 1: runs a"


def made(folder: Path, **extra: str) -> stack.Stack:
    """A stack that knows its settings and has started nothing."""
    one = stack.Stack(folder, models=MODELS, workers=0, extra=extra)
    one.environment = dict(one._extra)
    return one


def environment(folder: Path) -> dict[str, str]:
    made(folder)._write_environment()
    return dict(line.split("=", 1) for line in (folder / "environment").read_text().splitlines())


def test_other_shells_are_told_no_model_but_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An autoscaler that were told one would scale that one alone, while requests of the other wait."""
    assert "LONGHAUL_MODEL" not in environment(tmp_path)
    monkeypatch.setenv("LONGHAUL_MODEL", "b")
    assert environment(tmp_path)["LONGHAUL_MODEL"] == "b"


def test_other_shells_have_the_settings_of_this_one_but_not_a_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another quantisation they would look for requests of another model."""
    monkeypatch.setenv("LONGHAUL_QUANTIZE", "int8")
    monkeypatch.setenv("LONGHAUL_API_KEY", "secret")
    monkeypatch.setenv("LONGHAUL_API_URL", "http://another.example")
    found = environment(tmp_path)
    assert found["LONGHAUL_QUANTIZE"] == "int8"
    assert found["LONGHAUL_API_URL"] == made(tmp_path).api_url
    assert "LONGHAUL_API_KEY" not in found


def test_a_worker_of_several_models_takes_turns_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made(tmp_path)._worker_model == "all"
    assert made(tmp_path, LONGHAUL_MODEL="a")._worker_model == "a"
    monkeypatch.setenv("LONGHAUL_MODEL", "b")
    assert made(tmp_path)._worker_model == "b"


def test_up_refuses_a_model_that_is_not_served_before_it_starts_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LONGHAUL_MODEL", "z")
    result = CliRunner().invoke(cli.main, ["up", "--model", "a=x/a"])
    assert result.exit_code == 1
    assert "'z' is not in LONGHAUL_MODELS (a)" in result.output


def test_what_up_says_has_rows_of_a_terminals_width(tmp_path: Path) -> None:
    lines = made(tmp_path)
    lines.environment |= {
        "LONGHAUL_REDIS_URL": "redis://127.0.0.1:55823/0",
        "LONGHAUL_STORE_URL": "s3://longhaul",
    }
    told = lines.describe().replace(str(tmp_path), "/data").splitlines()
    assert all(len(line) <= 80 for line in told), told
    assert "              nobody runs a or b: its requests wait (see below)" in told


@pytest.mark.parametrize(
    ("model", "workers", "served", "gpus", "typed"),
    [
        ("all", 0, "a", 0, ["celery -A worker worker", "longhaul autoscale --cpus 2"]),
        ("all", 0, "ab", 2, ["LONGHAUL_MODEL=all celery -A worker worker", "longhaul autoscale"]),
        (
            "a",
            1,
            "abc",
            0,
            ["LONGHAUL_MODEL=b,c celery -A worker worker", "LONGHAUL_MODEL=b,c longhaul autoscale --cpus 2"],
        ),
        ("all", 1, "ab", 0, []),
    ],
)
def test_up_says_what_to_type_for_models_that_no_worker_runs(
    model: str, workers: int, served: str, gpus: int, typed: list[str]
) -> None:
    run = stack_lines.chosen(model, list(served)) if workers else []
    told = stack_lines.others(run, list(served), Path("a b"), gpus)
    lines = [line for line in told if line.startswith("  ")]
    assert lines == [f"  set -a; . 'a b/environment'; set +a; {command}" for command in typed]


def test_up_refuses_a_model_that_cannot_be_had_before_it_starts_anything(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.main, ["up", "--model", f"a={tmp_path}/a", "--dir", str(tmp_path / "data")]
    )
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"longhaul: --model a={tmp_path}/a: no such directory. Give a directory")
    assert not (tmp_path / "data").exists()


def test_a_workers_last_words_name_the_option_that_was_given(tmp_path: Path) -> None:
    failed = servers.ServerFailed(name="w", reason="ended", words="No. Check LONGHAUL_MODELS.", log="l")
    with pytest.raises(errors.LonghaulError, match=r"Check --model\."), cli._own_advice(True):
        raise failed
    with pytest.raises(servers.ServerFailed, match="LONGHAUL_MODELS"), cli._own_advice(False):
        raise failed
