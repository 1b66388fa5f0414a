"""What an operator sets is what the engine runs with."""

import dataclasses

import pytest

from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from worker import engine
from worker.engine import EngineConfig

_MODEL = ModelSettings(source="any")


def test_each_field_of_the_engine_is_a_setting_of_that_name() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    known = Settings.model_fields.keys() | ModelSettings.model_fields.keys()
    assert fields - known == {"cascade", "fast"}


def test_settings_reach_the_engine() -> None:
    settings = Settings.load(attention="dense", cuda_graphs=False, run_ahead=False, kv_host_bytes=7)
    config = engine._config(_MODEL.model_copy(update={"dtype": "float64"}), settings)
    assert (config.attention, config.cuda_graphs, config.run_ahead) == ("dense", False, False)
    assert (config.kv_host_bytes, config.dtype) == (7, "float64")


def test_a_gpu_has_larger_batches_unless_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_on_gpu", lambda device: True)
    config = engine._config(_MODEL, Settings.load(max_running=7))
    assert (config.max_running, config.prefill_chunk_tokens) == (7, 2048)
    monkeypatch.setenv("LONGHAUL_PREFILL_CHUNK_TOKENS", "9")
    config = engine._config(_MODEL, Settings.load())
    assert (config.max_running, config.prefill_chunk_tokens) == (256, 9)


def test_a_cpu_has_what_suits_it() -> None:
    config = engine._config(_MODEL, Settings.load(device="cpu"))
    assert (config.max_running, config.prefill_chunk_tokens) == (64, 512)
