"""The tiny model that tests elsewhere, and users, may rely on."""

from pathlib import Path

from jobs.model_settings import ModelSettings
from jobs.tokens import Tokenizer
from tests.unit.engine.conftest import request
from worker.engine import loader, tiny
from worker.engine.fallback import FallbackEngine


def test_the_same_seed_writes_the_same_model(tiny_path: Path, tmp_path: Path) -> None:
    again = tiny.tiny_model(tmp_path / "again")
    other = tiny.tiny_model(tmp_path / "other", seed=1)
    weights = "model.safetensors"
    assert (again / weights).read_bytes() == (tiny_path / weights).read_bytes()
    assert (other / weights).read_bytes() != (tiny_path / weights).read_bytes()


def test_its_tokenizer_reads_chats_and_loses_nothing(tiny_path: Path) -> None:
    tokenizer = Tokenizer.load("tiny", ModelSettings.model_validate({"source": str(tiny_path)}))
    assert tokenizer.context_tokens == 2048
    chat = tokenizer.template.render([{"role": "user", "content": "Grüße 😀\n\u2028"}])
    (ids,) = tokenizer.encode_chats([chat])
    assert chat.endswith("<|im_start|>assistant\n")
    assert "Grüße 😀\n\u2028" in tokenizer.decode(ids)


def test_its_greedy_outputs_vary_are_printable_and_end(tiny_loaded: loader.Loaded, open_tiny) -> None:  # type: ignore[no-untyped-def]
    engine: FallbackEngine = open_tiny()
    done = list(engine.generate(request(str(i), [i, 70, 80], max_tokens=100) for i in range(50)))
    assert len({c.text for c in done}) == 50
    assert all(c.text.isascii() and c.text.isprintable() for c in done)
    assert {c.finish_reason for c in done} == {"stop", "length"}
