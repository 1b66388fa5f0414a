"""Settings are read from the environment, checked there, and reach the engine."""

import json
from typing import Any

import pytest

from jobs import errors
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker import engine
from worker.engine import EngineConfig, opening


def test_what_an_engine_can_be_told_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, Any] = {
        "max_running": 7,
        "max_queue_delay_seconds": 0.5,
        "preferred_batch_sizes": (4, 8),
        "max_batch_tokens": 9000,
        "kv_memory_bytes": 1_000_000,
        "prefill_chunk_tokens": 99,
        "prefix_ttl_seconds": 60.0,
        "share_prefixes": False,
        "kernels": "torch",
        "tf32": True,
        "compile": "off",
    }
    for name, value in wanted.items():
        text = str(list(value)) if isinstance(value, tuple) else str(value)
        monkeypatch.setenv(f"LONGHAUL_{name.upper()}", text)
    opened: list[EngineConfig] = []
    monkeypatch.setattr(opening, "open_model", lambda source, config, name: opened.append(config))
    engine.open_engine("m", ModelSettings(source="somewhere"), Settings.load())
    assert {name: getattr(opened[0], name) for name in wanted} == wanted


def test_keys_in_the_environment_are_refused_with_what_to_do_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGHAUL_API_KEYS", '{"team": "geheim"}')
    with pytest.raises(errors.SettingsError, match="longhaul keys create") as caught:
        Settings.load()
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_QUEUE_DELAY_SECONDS", "-1"),
        ("PREFERRED_BATCH_SIZES", "[8, 0]"),
        ("MAX_BATCH_TOKENS", "0"),
        ("PREFILL_CHUNK_TOKENS", "0"),
        ("PREFIX_TTL_SECONDS", "0"),
        ("KERNELS", "cuda"),
        ("COMPILE", "maybe"),
    ],
)
def test_a_value_out_of_range_names_its_variable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"LONGHAUL_{name}", value)
    with pytest.raises(errors.SettingsError, match=f"LONGHAUL_{name}"):
        Settings.load()


@pytest.mark.parametrize("name", ["", " ", "none", "two\nlines", "nul\0", "half \ud83d"])
def test_a_model_has_a_name_that_keys_metrics_and_logs_can_have(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGHAUL_MODELS", json.dumps({name: {"source": "x"}}))
    with pytest.raises(errors.SettingsError, match=r"LONGHAUL_MODELS: .* can be no name"):
        Settings.load()


def test_a_models_name_may_have_all_that_is_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    name = 'org/mödel v2@x:y,"z" {a=b}'
    monkeypatch.setenv("LONGHAUL_MODELS", json.dumps({name: {"source": "x"}}))
    assert Settings.load().served == (name,)
