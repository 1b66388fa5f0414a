"""`longhaul queue-keys`: what autoscalers are told to look at."""

import pytest
from click.testing import CliRunner

from jobs import cli


def test_keys_are_those_of_control_and_of_each_exact_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_NAMESPACE", "mine")
    monkeypatch.setenv("LONGHAUL_MODELS", '{"a": {"source": "x"}, "b": {"source": "x", "revision": "2"}}')
    first = CliRunner().invoke(cli.main, ["queue-keys"]).stdout.splitlines()
    monkeypatch.setenv("LONGHAUL_MODELS", '{"a": {"source": "x"}, "b": {"source": "x", "revision": "3"}}')
    then = CliRunner().invoke(cli.main, ["queue-keys"]).stdout.splitlines()
    assert first[0] == "{mine}:control"
    assert [line.partition("@")[0] for line in first[1:]] == ["{mine}:requests:a", "{mine}:requests:b"]
    assert [now == before for now, before in zip(then, first, strict=True)] == [True, True, False]


def test_a_worker_of_some_models_follows_their_keys_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_MODELS", '{"a": {"source": "x"}, "b": {"source": "x"}}')
    for model, count in (("b", 1), ("all", 2), ("none", 0)):
        monkeypatch.setenv("LONGHAUL_MODEL", model)
        result = CliRunner().invoke(cli.main, ["queue-keys"])
        assert len(result.stdout.splitlines()) == 1 + count
        assert result.stderr == ""
    monkeypatch.setenv("LONGHAUL_MODEL", "z")
    result = CliRunner().invoke(cli.main, ["queue-keys"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'z' is not in LONGHAUL_MODELS (a, b)" in result.stderr


def test_no_model_at_all_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGHAUL_MODELS", raising=False)
    result = CliRunner().invoke(cli.main, ["queue-keys"])
    assert (result.exit_code, result.stdout) == (0, "{longhaul}:control\n")
    assert "LONGHAUL_MODELS is empty" in result.stderr


def test_settings_that_are_wrong_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_MODELS", "no JSON")
    result = CliRunner().invoke(cli.main, ["queue-keys"])
    assert result.exit_code == 1
    assert "LONGHAUL_MODELS" in result.stderr
