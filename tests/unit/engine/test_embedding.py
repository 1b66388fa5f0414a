"""Embeddings of tiny random models in float64, against transformers' hidden states of each text alone."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jobs import errors
from tests.unit.engine import architectures
from tests.unit.engine import embedding_models as models
from tests.unit.engine.conftest import request as generation
from tests.unit.engine.embedding_models import TEXTS, embed
from worker.engine import EmbeddingRequest, Engine, EngineConfig, tiny
from worker.engine.echo import EchoEngine
from worker.engine.embeddings import embedder, whole
from worker.engine.embeddings import requests as embedding
from worker.engine.embeddings.engine import EmbeddingEngine
from worker.engine.embeddings.pooling import Pooling
from worker.engine.fallback import FallbackEngine
from worker.engine.fast import FastEngine
from worker.engine.native import library

MODES = {
    "lasttoken": lambda hidden: hidden[-1],
    "mean": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
}
EXACT = 1e-9
# transformers computes some norms and softmaxes in float32 in a float64 model, too; our fused layers do not.
NORMED = 5e-6
NORMED_WHEREVER_THEY_RUN = ("deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "bloom")
WINDOWS = ("mistral", "gemma2", "gemma3_text", "gpt_oss")


def _everyday(*names: str) -> list[Any]:
    """Leave all but a few architectures to the long tier."""
    few = ("llama", "gemma2", "gpt_oss", "bloom")
    return [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in names]


def tolerance(name: str) -> float:
    if name in NORMED_WHEREVER_THEY_RUN:
        return NORMED
    return 1e-4 if name == "xglm" else EXACT  # which has no float64


def wanted(model: Any, mode: str) -> Tensor:
    return torch.stack([MODES[mode](models.alone(model, text)) for text in TEXTS])


@pytest.fixture
def opened() -> Iterator[list[Engine]]:
    """Engines to close after the test."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("mode", "kernels"), [("lasttoken", "auto"), ("mean", "auto"), ("mean", "torch")])
@pytest.mark.parametrize("name", _everyday("llama", "qwen3", "gpt2", "gpt_neox", "deepseek_v3", *WINDOWS))
def test_packed_texts_get_what_each_gets_alone(
    opened: list[Engine], name: str, mode: str, kernels: str
) -> None:
    engine = models.open_engine(architectures.build(name), Pooling((mode,)), kernels=kernels)
    opened.append(engine)
    assert isinstance(engine, FastEngine)
    expected = wanted(architectures.build(name), mode)
    found = embed(engine, TEXTS[:5], TEXTS[5:])
    assert (found - expected).abs().max() < NORMED * expected.abs().max()
    one_by_one = torch.cat([embed(engine, [text]) for text in TEXTS])
    assert (found - one_by_one).abs().max() < tolerance(name)
    assert engine.stats.padding_tokens == 0


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_scores_in_blocks_are_exact(opened: list[Engine], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "_MOST_SCORES", 3 * 4 * max(map(len, TEXTS)))
    engine = models.open_engine(architectures.build(name), Pooling(("mean",)), kernels="torch")
    opened.append(engine)
    expected = wanted(architectures.build(name), "mean")
    assert (embed(engine, TEXTS) - expected).abs().max() < NORMED * expected.abs().max()


@pytest.mark.parametrize("name", _everyday(*architectures.FALL_BACK, "llama", "gemma2", "deepseek_v3"))
def test_what_the_fallback_runs_is_exact(opened: list[Engine], name: str) -> None:
    model = architectures.build(name)
    expected = torch.cat([wanted(model, "lasttoken"), wanted(model, "mean")], 1)
    engine = models.open_engine(model, Pooling(("lasttoken", "mean")), fast=False)
    opened.append(engine)
    assert isinstance(engine, FallbackEngine)
    found = embed(engine, TEXTS[:5], TEXTS[5:])
    assert (found - expected).abs().max() < tolerance(name)


@pytest.mark.parametrize("name", models.ENCODERS)
def test_an_encoder_is_exact(opened: list[Engine], name: str) -> None:
    engine = models.open_engine(models.build(name), Pooling(tuple(MODES)))
    opened.append(engine)
    assert isinstance(engine, EmbeddingEngine)
    expected = torch.cat([wanted(models.build(name), mode) for mode in MODES], 1)
    assert (embed(engine, TEXTS[:5], TEXTS[5:]) - expected).abs().max() < EXACT * expected.abs().max()
    assert engine.stats.batches < len(TEXTS)
    assert engine.stats.padding_tokens > 0
    before = engine.stats.padding_tokens
    again = engine.generate(
        [EmbeddingRequest("a", tuple(TEXTS[:5])), EmbeddingRequest("b", tuple(TEXTS[5:]))]
    )
    assert sum(one.padding_tokens or 0 for one in again) == engine.stats.padding_tokens - before > 0
    kernels = library.kernels(torch.float64, torch.device("cpu"))
    assert engine.stats.native_kernels == (kernels is not None)


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_task_embed_leaves_the_head_out(opened: list[Engine], name: str) -> None:
    engine = models.open_engine(architectures.build(name), task="embed")
    opened.append(engine)
    assert isinstance(engine, EmbeddingEngine)
    expected = models.unit(wanted(architectures.build(name), "lasttoken"))
    assert (embed(engine, TEXTS) - expected).abs().max() < NORMED
    engine.add([generation("g", [1, 2])])
    assert "does not generate" in (engine.step()[0].error or "")


def test_task_generate_refuses_to_embed(opened: list[Engine]) -> None:
    engine = models.open_engine(architectures.build("llama"), task="generate")
    opened.append(engine)
    engine.add([EmbeddingRequest("a", ([1],))])
    assert "generate only" in (engine.step()[0].error or "")


@pytest.fixture(params=["fast", "fallback", "encoder"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine of each kind with small batches."""
    model = models.build("bert") if request.param == "encoder" else architectures.build("llama")
    engine = models.open_engine(
        model, fast=request.param != "fallback", prefill_chunk_tokens=64, max_running=4
    )
    yield engine
    engine.close()


@pytest.fixture
def one_batch_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no step compute for longer than its first batch takes, on any machine."""
    monkeypatch.setattr(embedder, "_SLICE_SECONDS", 1e-9)


def test_counters_say_what_was_computed(engine: Engine) -> None:
    embed(engine, TEXTS[:5], TEXTS[5:])
    stats = engine.stats
    assert stats.embeddings_made == len(TEXTS)
    assert stats.prefill_tokens_computed == sum(map(len, TEXTS))
    assert stats.requests_added == stats.requests_finished == 2
    assert 1 < stats.batches < len(TEXTS)
    assert not engine.has_work


def test_a_completion_has_vectors_and_no_text(engine: Engine) -> None:
    (done,) = engine.generate([EmbeddingRequest("a", tuple(TEXTS[:3]))])
    assert (done.token_ids, done.text, done.finish_reason, done.cached_tokens) == ([], "", "stop", 0)
    assert [len(vector) for vector in done.embeddings or []] == [32] * 3
    assert all(math.isclose(math.hypot(*vector), 1, abs_tol=1e-6) for vector in done.embeddings or [])
    assert done.timings.admitted <= done.timings.finished
    json.dumps(done.embeddings, allow_nan=False)


def test_two_thousand_inputs_come_back_in_their_order(engine: Engine) -> None:
    texts = [[2 + i % 200, 2 + i // 200, *range(3, 3 + i % 5)] for i in range(2048)]
    found = embed(engine, texts)
    for i in (0, 1, 777, 2047):
        assert (found[i] - embed(engine, [texts[i]])[0]).abs().max() < EXACT


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ((), "no input"),
        (([1], []), "input 1 has no tokens"),
        (([1], [100_000]), "token ids outside"),
        (([1], [-1]), "token ids outside"),
        (([1], [5] * 600), "input 1 has 600 tokens, which exceed the context of 51"),
    ],
)
def test_what_can_never_run_is_an_error(engine: Engine, inputs: tuple[list[int], ...], reason: str) -> None:
    engine.add([EmbeddingRequest("a", inputs)])
    done = engine.step()
    assert [c.finish_reason for c in done] == ["error"]
    assert reason in (done[0].error or "")
    assert not engine.has_work


def test_a_roberta_has_fewer_positions_than_rows(opened: list[Engine]) -> None:
    engine = models.open_engine(models.build("roberta"))
    opened.append(engine)
    assert engine.context_tokens == 512
    assert embed(engine, [[5] * 512]).isfinite().all()


@pytest.mark.usefixtures("one_batch_a_step")
def test_a_cancelled_request_yields_no_stale_completion(engine: Engine) -> None:
    engine.add([EmbeddingRequest("a", tuple(TEXTS))])
    assert engine.step() == []
    assert engine.running == {"a"}
    engine.cancel(["a"])
    computed = engine.stats.prefill_tokens_computed
    assert [(c.id, c.finish_reason) for c in engine.step()] == [("a", "cancelled")]
    assert not engine.has_work
    assert engine.step() == []
    (done,) = engine.generate([EmbeddingRequest("b", ([5],))])
    assert done.id == "b"
    assert engine.stats.prefill_tokens_computed == computed + 1


@pytest.mark.usefixtures("one_batch_a_step")
def test_an_id_added_again_starts_anew(engine: Engine) -> None:
    engine.add([EmbeddingRequest("a", tuple(TEXTS))])
    engine.step()
    engine.add([EmbeddingRequest("a", ([5, 6],))])
    (done,) = engine.generate([])
    assert len(done.embeddings or []) == 1


def test_requests_lost_on_admission_do_not_run(engine: Engine) -> None:
    engine.on_admit = lambda ids: ["b"]
    engine.add([EmbeddingRequest("a", ([5],)), EmbeddingRequest("b", ([6, 7],))])
    assert [c.id for c in engine.generate([])] == ["a"]
    assert engine.stats.prefill_tokens_computed == 1


def test_a_failing_admission_leaves_requests_waiting(engine: Engine) -> None:
    def refuse(ids: list[str]) -> list[str]:
        raise ConnectionError("no answer")

    engine.on_admit = refuse
    engine.add([EmbeddingRequest("a", ([5],))])
    with pytest.raises(ConnectionError):
        engine.step()
    assert engine.waiting == {"a"}
    engine.on_admit = lambda ids: ()
    assert [c.id for c in engine.generate([])] == ["a"]


@pytest.mark.usefixtures("one_batch_a_step")
def test_no_more_run_than_max_running(engine: Engine) -> None:
    engine.add([EmbeddingRequest(str(i), tuple(TEXTS)) for i in range(6)])
    assert engine.room() == 0
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.running))
    assert 0 < most <= 4
    assert engine.room() == 4


@pytest.mark.parametrize("fast", [True, False])
def test_generation_and_embedding_go_on_beside_one_another(opened: list[Engine], fast: bool) -> None:
    engine = models.open_engine(architectures.build("llama"), fast=fast, max_running=3)
    opened.append(engine)
    plain = {c.id: c.token_ids for c in engine.generate(_prompts(6))}
    vectors = embed(engine, TEXTS)
    tokens, made = engine.stats.tokens_sampled, engine.stats.embeddings_made
    engine.add([request for pair in zip(_prompts(6), _texts(6), strict=True) for request in pair])
    done: list[Any] = []
    while len({each.id[0] for each in done}) < 2 and engine.has_work:
        done += engine.step()
    assert engine.stats.tokens_sampled > tokens
    assert engine.stats.embeddings_made > made
    assert engine.has_work, "neither kind has waited for the other to end"
    done += engine.generate([])
    assert len(done) == 12
    for each in done:
        if each.id.startswith("g"):
            assert each.token_ids == plain[each.id]
        else:
            found = torch.tensor(each.embeddings, dtype=torch.float64)
            assert (found - vectors.repeat(_REPEATS, 1)).abs().max() < EXACT


_REPEATS = 12


def _prompts(count: int) -> list[Any]:
    return [generation(f"g{i}", TEXTS[i], max_tokens=25, ignore_eos=True) for i in range(count)]


def _texts(count: int) -> list[EmbeddingRequest]:
    return [EmbeddingRequest(f"e{i}", tuple(TEXTS * _REPEATS)) for i in range(count)]


def saved(model: Any, path: Path) -> str:
    """Write a model with the tokenizer of the tiny one."""
    tiny._tokenizer(512).save_pretrained(path)
    model.save_pretrained(path)
    return str(path)


def test_an_encoder_loads_without_a_head_and_pools_as_its_files_say(
    tmp_path: Path, opened: list[Engine]
) -> None:
    model = models.build("bert")
    source = saved(model, tmp_path)
    models.write_modules(tmp_path, {"pooling_mode_cls_token": True})
    engine = Engine.load(source, EngineConfig(device="cpu", dtype="float64"))
    opened.append(engine)
    assert isinstance(engine, EmbeddingEngine)
    assert (embed(engine, TEXTS) - wanted(model, "cls")).abs().max() < EXACT * 100


def test_a_decoder_saved_without_its_head_embeds_packed(tmp_path: Path, opened: list[Engine]) -> None:
    model = architectures.build("llama")
    engine = Engine.load(saved(model.model, tmp_path), EngineConfig(device="cpu", dtype="float64"))
    opened.append(engine)
    assert isinstance(engine, EmbeddingEngine)
    expected = models.unit(wanted(model, "lasttoken"))
    assert (embed(engine, TEXTS) - expected).abs().max() < NORMED
    assert engine.stats.padding_tokens == 0


def test_a_pooling_that_is_unknown_keeps_a_model_from_embedding_only(
    tmp_path: Path, opened: list[Engine]
) -> None:
    source = saved(architectures.build("llama"), tmp_path)
    models.write_modules(tmp_path, {"pooling_mode": "median"})
    engine = Engine.load(source, EngineConfig(device="cpu", kv_memory_bytes=1 << 24))
    opened.append(engine)
    done = {c.id: c for c in engine.generate([EmbeddingRequest("e", ([1],)), generation("g", [1, 2])])}
    assert "median" in (done["e"].error or "")
    assert done["g"].error is None
    with pytest.raises(errors.ModelUnavailable, match=r"does not embed.*median"):
        Engine.load(source, EngineConfig(device="cpu", task="embed"))


def test_the_echo_engine_embeds_without_a_model(tiny_path: Path) -> None:
    engine = EchoEngine.open(str(tiny_path), EngineConfig(), faults=["raise:BAD"])
    bad = engine.tokenizer.encode("so BAD").ids
    engine.add([EmbeddingRequest("a", ([1, 2], [3])), EmbeddingRequest("b", (bad,)), generation("g", [4])])
    done = {c.id: c for c in engine.generate([])}
    assert done["a"].embeddings == [embedding.hashed([1, 2]), embedding.hashed([3])]
    assert (done["a"].token_ids, done["a"].finish_reason) == ([], "stop")
    assert "injected" in (done["b"].error or "")
    assert done["g"].token_ids == [4]


def test_the_echo_engines_vectors_depend_on_every_id() -> None:
    vectors = [embedding.hashed(ids) for ids in ([1, 2, 3], [1, 2, 4], [12, 3], [1, 23])]
    assert len({tuple(vector) for vector in vectors}) == 4
    assert all(math.isclose(math.hypot(*vector), 1) and len(vector) == 8 for vector in vectors)
    assert embedding.hashed([1, 2, 3]) == vectors[0]
