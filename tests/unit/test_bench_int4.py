"""The benchmark of quantised weights measures what it says."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from bench import bandwidth, children, figures, int4, int4_layers, int4_quality, int4_speed, int4_subjects
from bench.children import Run
from bench.workloads import Workload
from worker.engine import EngineConfig, loader
from worker.engine.tiny import tiny_model

FULL = int4_subjects.FULL
ROUNDED = replace(FULL, quantize="int4", quantize_head="keep", quantize_group=32, quantize_method="rtn")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.quantize.cache.directory", lambda: tmp_path)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_perplexity_is_of_all_tokens_but_the_first(tiny: Path) -> None:
    model = loader.load(str(tiny), EngineConfig(device="cpu")).model
    ids = [(7 * i * i + 3 * i) % 250 for i in range(513)]
    window = torch.tensor([ids[:512]])
    with torch.inference_mode():
        loss = model(window, labels=window).loss
    assert int4_quality.perplexity(model, ids, 511) == pytest.approx(math.exp(float(loss)), rel=1e-5)


def test_a_model_agrees_with_itself(tiny: Path) -> None:
    loaded = loader.load(str(tiny), EngineConfig(device="cpu"))
    prompt = [5, 6, 7, 8]
    said = int(loaded.model(torch.tensor([prompt])).logits[0, -1].argmax())
    assert int4_quality.agreement(loaded.model, [(prompt, [said])])["greedy_agreement"] == 1
    assert int4_quality.agreement(loaded.model, [(prompt, [said + 1])])["greedy_agreement"] == 0


def test_the_bytes_of_a_group_are_those_that_are_promised(tiny: Path) -> None:
    for group, most in ((32, 0.32), (64, 0.30)):
        config = EngineConfig(device="cpu", quantize="int4", quantize_group=group, quantize_method="rtn")
        model = loader.load(str(tiny), config).model
        assert int4_quality.linear_bytes_ratio(model) <= most


@pytest.mark.long
def test_what_is_measured_is_not_what_is_calibrated_by() -> None:
    measured, held_out = int4_quality.docstrings()
    assert len(measured) > 50_000 * 4
    assert not set(measured.split("\n\n")[:20]) & set(held_out.split("\n\n"))


def test_the_default_is_what_the_setting_takes() -> None:
    with int4_subjects.subject("int4", EngineConfig().quantize_group, "source", "") as found:
        assert found.config == replace(FULL, quantize="int4")
        assert found.is_default
    with int4_subjects.subject("int4", 32, "source", "") as found:
        assert not found.is_default


def test_integers_of_one_format_are_timed_once() -> None:
    made = [int4_subjects.Subject(name, 64, "", FULL) for name in int4_subjects.METHODS]
    assert [each.format for each in made] == [("int8", 64), *[("int4", 64)] * 3, ("gguf", 64)]
    assert int4_subjects.Subject("int4", 32, "", FULL).format == ("int4", 32)


def test_a_worker_loads_a_subject_as_the_bench_does() -> None:
    with int4_subjects.subject("int4-rtn", 128, "source", "", "int8") as found:
        assert replace(FULL, **found.settings) == found.config


@torch.inference_mode()
def test_an_error_of_layers_is_that_of_their_outputs(tiny: Path) -> None:
    full, rounded = (loader.load(str(tiny), config).model for config in (FULL, ROUNDED))
    ids = [(5 * i * i + i) % 250 for i in range(256)]
    found = int4_layers.layer_error(full, rounded, ids)
    name = "model.layers.0.self_attn.q_proj"
    x = full.model.layers[0].input_layernorm(full.model.embed_tokens(torch.tensor([ids])))
    right = full.get_submodule(name)(x)
    wrong = rounded.get_submodule(name)(x) - right
    first = float(wrong.norm() / right.norm())
    assert 0 < found["mean"] <= found["greatest"]
    assert first <= found["greatest"] * 1.001
    only = replace_by(full, rounded, name)
    assert int4_layers.layer_error(full, only, ids)["mean"] == pytest.approx(first, abs=1e-5)


def replace_by(full: Any, rounded: Any, name: str) -> Any:
    """Return the rounded model with one product rounded and the others as they were."""
    parents = [n for n, each in rounded.named_modules() if hasattr(each, "grouped") and n != name]
    for each in parents:
        parent, _, child = each.rpartition(".")
        setattr(rounded.get_submodule(parent), child, full.get_submodule(each))
    return rounded


def test_a_step_reads_all_weights_but_of_embeddings_rows(tiny: Path) -> None:
    full, rounded = (loader.load(str(tiny), config).model for config in (FULL, ROUNDED))
    everything = sum(each.nbytes for each in full.parameters())
    embeddings = full.get_input_embeddings().weight
    assert bandwidth.step_bytes(full) == everything - embeddings.nbytes
    linears = [each.weight for n, each in full.named_modules() if n.endswith("_proj")]
    spared = sum(each.nbytes - each.numel() // 2 - each.numel() // 32 * 4 for each in linears)
    assert bandwidth.step_bytes(rounded) == bandwidth.step_bytes(full) - spared
    full.lm_head.weight = embeddings
    assert bandwidth.step_bytes(full) == sum(each.nbytes for each in full.parameters())


class Steady:
    """An engine that takes so many seconds for each run; notes what it ran."""

    def __init__(self, seconds: float, notes: list[tuple["Steady", Workload]]) -> None:
        self.seconds, self.notes = seconds, notes

    def run(self, workload: Workload) -> Run:
        self.notes.append((self, workload))
        return Run(self.seconds, 1, [[0] * output for _, output in workload], None, {})


def test_engines_take_turns_with_prompts_that_none_has_seen() -> None:
    notes: list[tuple[Steady, Workload]] = []
    engines: list[Any] = [Steady(1.0, notes), Steady(2.0, notes)]
    inputs = figures.Inputs(list(range(4000)), list(range(1000, 3000)))
    slow, fast = int4_speed.by_batch_size(engines, inputs, 3)[::-1]
    assert fast == {"1": 64.0, "8": 512.0, "64": 4096.0}
    assert slow == {"1": 32.0, "8": 256.0, "64": 2048.0}
    for engine in engines:
        firsts = [prompt[0] for who, work in notes if who is engine for prompt, _ in work]
        assert len(set(firsts)) == len(firsts)
    measured = [who for who, work in notes if work[0][1] == 64]
    assert measured[:6] == [*engines, *engines[::-1], *engines]


def test_peers_that_are_not_installed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(children, "VENVS", tmp_path)
    (tmp_path / "openvino" / "bin").mkdir(parents=True)
    (tmp_path / "openvino" / "bin" / "python").touch()
    assert int4_speed.installed() == ["openvino-int4", "openvino-int8"]
    assert "without llamacpp-q4_1: llamacpp is not installed" in capsys.readouterr().err


@pytest.mark.long
def test_the_command_prints_a_line_for_each_method(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(int4_quality, "docstrings", lambda: ("measured " * 300, "kept " * 300))
    monkeypatch.setattr(int4_quality, "embedder", lambda: None)
    monkeypatch.setattr(bandwidth, "_BYTES", 1 << 20)
    command = ["--model", str(tiny), "--threads", "1", "--tokens", "511", "--no-memory", "--no-speed"]
    done = CliRunner().invoke(int4.main, [*command, "--group", "32", "--json"], catch_exceptions=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["method"] for line in lines] == ["int8", "int4-rtn", "int4", "int4-calibrated"]
    for line in lines:
        assert 0 < line["linear_bytes_ratio_fp16"] < 0.6
        assert line["perplexity"] == pytest.approx(line["perplexity_fp32"], rel=0.5)
        assert 0 < line["layer_error"]["mean"] <= line["layer_error"]["greatest"] < 0.5
        assert line["bandwidth_limit_tokens_per_second"] > 0
        assert 0 <= line["greedy_agreement"] <= 1
    assert lines[0]["layer_error"]["mean"] < lines[1]["layer_error"]["mean"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_whole_command_measures_the_small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ["--method", "int4", "--group", "64", "--tokens", "511", "--repeats", "1"]
    command += ["--no-agreement", "--no-peers"]
    done = CliRunner().invoke(int4.main, [*command, "--threads", "1", "--json"], catch_exceptions=False)
    (line,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert line["default"] is True
    assert line["perplexity"] < 1.3 * line["perplexity_fp32"]
    assert line["linear_bytes_ratio_fp16"] <= 0.30
    assert set(line["tokens_per_second"]) == set(line["fp32_tokens_per_second"]) == {"1", "8", "64"}
    assert line["resident_bytes"] < line["resident_bytes_fp32"] / 2
    assert line["peak_load_bytes"] > line["resident_bytes"]
