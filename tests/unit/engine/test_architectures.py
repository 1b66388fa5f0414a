"""Every architecture gives in a batch, token for token, what transformers gives for each prompt alone."""

import pytest

from tests.unit.engine import architectures
from tests.unit.engine.conftest import request
from tests.unit.engine.test_fallback import PROMPTS, generate_alone
from worker.engine import EngineConfig, loader
from worker.engine.fallback import FallbackEngine

NAMES = [
    name if name in architectures.EVERYDAY else pytest.param(name, marks=pytest.mark.long)
    for name in architectures.CONFIGS
]
# Alone, too, transformers lets it see what ran before when a prompt has a single token.
CARRIES_STATE = ("recurrent_gemma",)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_equal_to_one_by_one_generate(name: str, tiny_loaded: loader.Loaded) -> None:
    loaded = loader.wrap(architectures.build(name), tiny_loaded.tokenizer)
    engine = FallbackEngine(loaded, EngineConfig(max_running=4))
    try:
        requests = [
            request(f"{i}{n}", prompt[: 60 + n], max_tokens=6 + i, ignore_eos=True)
            for i, prompt in enumerate(PROMPTS)
            if len(prompt) > 1 or name not in CARRIES_STATE
            for n in range(2)
        ]
        done = {c.id: c for c in engine.generate(requests)}
        assert [c.error for c in done.values()] == [None] * len(requests)
        for r in requests:
            assert done[r.id].token_ids == generate_alone(
                engine, r.prompt_ids, r.sampling.max_tokens, eos=False
            )
        assert len({token for c in done.values() for token in c.token_ids}) >= 10
    finally:
        engine.close()
