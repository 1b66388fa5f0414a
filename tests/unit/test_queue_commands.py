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


def test_settings_that_are_wrong_are_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_MODELS", "no JSON")
    result = CliRunner().invoke(cli.main, ["queue-keys"])
    assert result.exit_code == 1
    assert "LONGHAUL_MODELS" in result.stderr
