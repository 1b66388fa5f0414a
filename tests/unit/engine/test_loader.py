"""Every kind of source loads, and what cannot is refused in one line."""

import logging
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from jobs import errors
from jobs.model_settings import ModelSettings
from jobs.settings import Settings
from tests.unit.engine.conftest import request
from tests.unit.engine.quantize import checkpoints
from worker.engine import Engine, EngineConfig, loader, open_engine
from worker.engine.echo import EchoEngine
from worker.engine.fast import FastEngine

CPU = EngineConfig(device="cpu")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: Any, **options: Any) -> None:
        raise AssertionError("a local source must not reach for the network")

    monkeypatch.setattr("socket.socket.connect", connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)


def test_open_engine_loads_what_the_settings_name(tiny_path: Path) -> None:
    model = ModelSettings.model_validate({"source": str(tiny_path), "context_tokens": 100})
    engine = open_engine("tiny", model, Settings(max_running=3, device="cpu"))
    assert isinstance(engine, FastEngine)
    assert (engine.room(), engine.context_tokens) == (3, 100)
    engine.close()


def test_the_log_says_when_loading_begins_and_ends(tiny_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # bench/scale_run.py tells imports and weights apart by these.
    with caplog.at_level(logging.INFO, "worker"):
        loader.load(str(tiny_path), CPU, "tiny")
    told = {record.message: vars(record) for record in caplog.records}
    assert [text for text in told if text.startswith("model load")] == ["model loading", "model loaded"]
    for facts in (told["model loading"], told["model loaded"]):
        assert (facts["model"], str(facts["device"])) == ("tiny", "cpu")


def test_open_engine_opens_an_echo(tiny_path: Path) -> None:
    model = ModelSettings.model_validate({"source": str(tiny_path), "engine": "echo", "faults": ["slow:0"]})
    assert isinstance(open_engine("tiny", model, Settings()), EchoEngine)


def test_a_local_directory_loads_without_the_network(tiny_path: Path, no_network: None) -> None:
    loaded = loader.load(str(tiny_path), CPU)
    assert loaded.model.dtype == torch.float32
    assert loaded.context_tokens == 2048
    assert loaded.eos_ids == {loaded.tokenizer.eos_token_id}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_of_the_settings_is_used(tiny_path: Path, dtype: str) -> None:
    loaded = loader.load(str(tiny_path), EngineConfig(device="cpu", dtype=dtype))
    assert loaded.model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("/no/such/directory", "no such directory"),
        ("./none", "no such directory"),
        ("~/none-at-all", "no such directory"),
        ("a/b/c", "no such directory"),
        ("/no/such/model.gguf", "no such file"),
    ],
)
def test_a_path_that_is_not_there_fails_at_once(source: str, reason: str, no_network: None) -> None:
    with pytest.raises(errors.ModelUnavailable, match=reason) as caught:
        Engine.load(source, CPU)
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_a_model_is_refused_in_one_line(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(errors.ModelUnavailable) as caught:
        Engine.load(str(tmp_path), CPU)
    assert "\n" not in str(caught.value)


def test_weights_that_this_user_may_not_read_are_not_said_to_be_missing(tiny_path: Path) -> None:
    """As in a container whose user does not own what is mounted."""
    was = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        closed = Path(folder, "closed")
        shutil.copytree(tiny_path, closed)
        (closed / "model.safetensors").chmod(0)
        for place in (Path(folder), closed):
            place.chmod(0o755)
        try:
            if was == 0:
                os.seteuid(65534)
            with pytest.raises(errors.ModelUnavailable, match="cannot be read, perhaps not by this user"):
                Engine.load(str(closed), CPU)
        finally:
            os.seteuid(was)


def test_broken_weights_are_refused_in_one_line(tiny_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_path, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(errors.ModelUnavailable) as caught:
        Engine.load(str(broken), CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"device": "toaster"}, "not a device"),
        ({"device": "cuda:97"}, "GPUs"),
        ({"device": "cpu", "dtype": "float7"}, "not a dtype"),
    ],
)
def test_a_device_or_dtype_that_is_not_there_is_named(
    tiny_path: Path, fields: dict[str, str], reason: str
) -> None:
    with pytest.raises(errors.ModelUnavailable, match=reason):
        Engine.load(str(tiny_path), EngineConfig(**fields))  # type: ignore[arg-type]


def test_a_model_that_does_not_generate_is_refused(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(loaded: loader.Loaded) -> None:
        raise RuntimeError("mat1 and mat2\nshapes")

    monkeypatch.setattr("worker.engine.padding.try_batches", fail)
    with pytest.raises(errors.ModelUnavailable, match="does not generate: RuntimeError: mat1 and mat2"):
        Engine.load(str(tiny_path), replace(CPU, fast=False))


def test_sampling_defaults_of_a_checkpoint_do_not_act(tiny_path: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(tiny_path, changed)
    (changed / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 3.0, "top_p": 0.5, "repetition_penalty": 1.8,'
        ' "eos_token_id": [258, 7]}'
    )
    plain, other = Engine.load(str(tiny_path), CPU), Engine.load(str(changed), CPU)
    try:
        requests = [request("a", [1, 2, 3], max_tokens=30, ignore_eos=True)]
        assert [c.token_ids for c in plain.generate(requests)] == [
            c.token_ids for c in other.generate(requests)
        ]
        ended = [
            c.token_ids[-1]
            for c in other.generate(request(str(i), [i, 3, 4], max_tokens=80) for i in range(40))
            if c.finish_reason == "stop"
        ]
        assert set(ended) == {258, 7}, "each of the end tokens ends a row"
    finally:
        plain.close()
        other.close()


def test_a_gguf_file_gives_the_model_that_is_in_it(tiny_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    reference = loader.load(str(tiny_path), CPU)
    write_gguf(file, reference)
    loaded = loader.load(str(file), CPU)
    assert not hasattr(loaded.model.config, "quantization_config")
    for name, weight in reference.model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], weight)
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded.model(ids).logits, reference.model(ids).logits)
    loaded.model.save_pretrained(tmp_path / "saved")


def write_gguf(file: Path, loaded: loader.Loaded) -> None:
    """Write the tiny Llama as GGUF, float32, query and key rows in GGUF's order."""
    config, tokenizer = loaded.model.config, loaded.tokenizer
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    tokens[200] = "ab"  # a tokenizer must have a merge, and its token
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    layers = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in layers.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, weight in loaded.model.state_dict().items():
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                rows = weight.reshape(heads, 2, -1, weight.shape[-1])
                weight = rows.transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names[name], weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("part", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_refused_by_its_name(
    part: str, tiny_path: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_path, tmp_path / "model")
    checkpoints.change(tmp_path / "model", lambda tensors: tensors.pop(part))
    with pytest.raises(errors.ModelUnavailable, match=rf"has no {part} \(1 weights"):
        Engine.load(str(tmp_path / "model"), CPU)
