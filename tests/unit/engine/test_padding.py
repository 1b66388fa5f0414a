"""A model whose padded rows differ from single ones is found when it is loaded, and still right."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.unit.engine.conftest import request
from tests.unit.engine.test_fallback import PROMPTS, generate_alone
from worker.engine import EngineConfig, loader, padding
from worker.engine.fallback import FallbackEngine
from worker.engine.padding import Batches


class IgnoresMask(LlamaForCausalLM):
    """Attends to the padding, as a model with recurrent state may."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        return super().forward(input_ids=input_ids, **options)


class NoRaggedBatch(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        if len(set(options["attention_mask"].sum(-1).tolist())) > 1:
            raise NotImplementedError("ragged")
        return super().forward(input_ids=input_ids, **options)


class MixesRows(LlamaForCausalLM):
    """Rows of one batch see each other, which is a fault that real models have had."""

    def forward(self, input_ids: Any = None, **options: Any) -> Any:
        output = super().forward(input_ids=input_ids, **options)
        output.logits = output.logits + output.logits.flip(0).roll(1, -1)
        return output


def variant(loaded: loader.Loaded, kind: type[LlamaForCausalLM]) -> loader.Loaded:
    model = kind(loaded.model.config).to(torch.float64)
    model.load_state_dict(loaded.model.state_dict())
    return loader.wrap(model, loaded.tokenizer)


def test_a_model_that_heeds_its_mask_may_be_padded(tiny_loaded: loader.Loaded) -> None:
    assert padding.try_batches(tiny_loaded) == (Batches.PADDED, "")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (IgnoresMask, "logits in a batch are off"),
        (NoRaggedBatch, "a batch raises NotImplementedError: ragged"),
    ],
)
def test_a_model_that_does_not_runs_in_batches_of_one_length(
    tiny_loaded: loader.Loaded, kind: type[LlamaForCausalLM], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = variant(tiny_loaded, kind)
    engine = FallbackEngine(loaded, EngineConfig())
    try:
        assert (engine.stats.padding_differs, engine.stats.batches_differ) == (1, 0)
        assert reason in caplog.text
        requests = [request(f"{i}{n}", p, max_tokens=12) for i, p in enumerate(PROMPTS) for n in "ab"]
        done = {c.id: c for c in engine.generate(requests)}
        assert engine.stats.batches == len(PROMPTS)
        assert engine.stats.padding_tokens == 0
        plain = FallbackEngine(tiny_loaded, EngineConfig())
        for r in requests:
            assert done[r.id].token_ids == generate_alone(plain, r.prompt_ids, 12)
        plain.close()
    finally:
        engine.close()


def test_a_model_whose_rows_mix_runs_them_one_by_one(tiny_loaded: loader.Loaded) -> None:
    engine = FallbackEngine(variant(tiny_loaded, MixesRows), EngineConfig())
    try:
        assert (engine.stats.padding_differs, engine.stats.batches_differ) == (1, 1)
        requests = [request(str(i), p, max_tokens=9) for i, p in enumerate(PROMPTS)]
        done = {c.id: c for c in engine.generate(requests)}
        for r in requests:
            assert done[r.id].token_ids == generate_alone(engine, r.prompt_ids, 9)
        assert engine.stats.batches == len(PROMPTS)
    finally:
        engine.close()


def test_a_model_without_a_mask_is_not_padded(
    tiny_loaded: loader.Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding, "takes_mask", lambda model: False)
    assert padding.try_batches(tiny_loaded) == (Batches.ONE_LENGTH, "the model takes no attention mask")
    assert "attention_mask" not in padding.padded([[1, 2]], tiny_loaded)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_the_longest_row_is_not_padded(
    tiny_loaded: loader.Loaded, rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding, "_rope_types", lambda config: {rope})
    batches, reason = padding.try_batches(tiny_loaded)
    assert batches is Batches.ONE_LENGTH
    assert "rotary" in reason


def test_rope_types_of_layers_of_several_kinds(tiny_loaded: loader.Loaded) -> None:
    config = tiny_loaded.model.config
    assert padding._rope_types(config) == {"default"}

    class Layered:
        rope_parameters = {"full": {"rope_type": "longrope"}, "sliding": {"rope_type": "default"}}

        def get_text_config(self) -> "Layered":
            return self

    assert padding._rope_types(Layered()) >= {"longrope", "default"}
