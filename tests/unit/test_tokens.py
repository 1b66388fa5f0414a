import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from jobs import errors, tokens
from jobs.model_settings import ModelSettings
from tests.unit import planning

SPECIAL = ["<s>", "<|im_start|>", "<|im_start|>x", "<|im_end|>", "[SEP]"]
CORPUS = ["the cat sat on the mat", "def f(x):\n    return x + 1", "É caffè Ünï 12 345"] * 3


def _trained(kind: str) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "bert":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer = normalizers.BertNormalizer()
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", *SPECIAL])
    elif kind == "metaspace":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", special_tokens=["<unk>"])
    elif kind == "prepend":
        backend = Tokenizer(models.BPE(unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFKC()]
        )
        trainer = trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>"])
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=kind == "prefix space")
        if kind == "split":
            backend.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(r"\s+(?!\S)|\s+|\p{N}{1,3}|[^\s\p{N}]+"), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=[])
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    backend = _trained(kind)
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = processors.TemplateProcessing("<s> $A [SEP]", None, _ids(backend))
    if kind == "truncating":
        backend.enable_truncation(3)
        backend.enable_padding(length=8)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _ids(backend: Tokenizer) -> list[tuple[str, int]]:
    return [(token, backend.token_to_id(token)) for token in ("<s>", "[SEP]")]


def _plain(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return found


TEXT = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "start|>", "[SEP", " ", "\n", "▁", "the cat", "É", "12", "\u2028"])
    | st.text(max_size=6),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", ["bytes", "prefix space", "split", "bert", "prepend", "truncating"])
def test_encoding_between_special_tokens_equals_encoding_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_CACHED_SEGMENT_CHARACTERS", 2)
    monkeypatch.setattr(tokens, "_CACHE_CHARACTERS", 40)
    backend = _tokenizer(kind)
    cached = tokens.Tokenizer(backend, 100)
    assert cached._segments is not None

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(TEXT, max_size=4))
    def same(texts: list[str]) -> None:
        whole = _plain(backend, texts) if texts else []
        assert cached.encode_chats(texts) == whole
        assert cached.encode_chats(texts * 2) == whole * 2

    same()


def test_metaspace_tells_the_first_piece_apart_so_nothing_is_cached() -> None:
    backend = _tokenizer("metaspace")
    cached = tokens.Tokenizer(backend, 100)
    assert cached._segments is None
    texts = ["the cat<s>the cat", "<s> the"]
    assert cached.encode_chats(texts) == _plain(backend, texts)


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word", "normalized"])
def test_a_special_token_that_takes_of_its_neighbours_switches_the_cache_off(option: str) -> None:
    backend = _trained("bytes")
    backend.add_special_tokens([AddedToken("<t>", **{option: True})])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    cached = tokens.Tokenizer(tokenizer, 100)
    assert cached._segments is None
    assert cached.encode_chats(["a <t> b"]) == _plain(tokenizer, ["a <t> b"])


def test_special_tokens_taken_as_text_switch_the_cache_off() -> None:
    backend = _trained("bytes")
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, split_special_tokens=True)
    cached = tokens.Tokenizer(tokenizer, 100)
    assert cached._segments is None
    assert cached.encode_chats(["a<s>b"]) == _plain(tokenizer, ["a<s>b"])


def test_a_class_that_does_more_than_its_backend_switches_the_cache_off() -> None:
    class Lowering(PreTrainedTokenizerFast):
        def __call__(self, texts: Any, **options: Any) -> Any:
            return super().__call__([text.lower() for text in texts], **options)

    backend = _trained("bytes")
    backend.add_special_tokens(["<s>"])
    cached = tokens.Tokenizer(Lowering(tokenizer_object=backend), 100)
    assert cached._segments is None


def test_a_repeated_prefix_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tokens.Tokenizer(_tokenizer("bytes"), 100)
    assert cached._segments is not None
    system = "the cat sat " * 30
    cached.encode_chats([f"<s>{system}<|im_end|>a"])

    class Asked:
        texts: list[str] = []

        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
            self.texts += texts
            return list(_tokenizer("bytes").backend_tokenizer.encode_batch_fast(texts, add_special_tokens))

    monkeypatch.setattr(cached._segments, "_backend", Asked())
    cached.encode_chats([f"<s>{system}<|im_end|>{n}" for n in range(5)])
    assert sorted(Asked.texts) == ["0", "1", "2", "3", "4"]


def test_the_cache_forgets_what_was_not_used_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CACHE_CHARACTERS", 1000)
    cached = tokens.Tokenizer(_tokenizer("bytes"), 100)
    assert cached._segments is not None
    system = "s" * 300
    for n in range(20):
        cached.encode_chats([f"{system}<s>{n:0300}"])
    assert system in cached._segments._known
    assert cached._segments._characters == sum(map(len, cached._segments._known)) <= 1000


def test_threads_may_share_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_CACHE_CHARACTERS", 2000)
    cached = tokens.Tokenizer(_tokenizer("bytes"), 100)
    texts = [f"{n:0300}<s>" for n in range(30)]
    right = _plain(_tokenizer("bytes"), texts)
    wrong: list[object] = []

    def work() -> None:
        try:
            for _ in range(20):
                if cached.encode_chats(texts) != right or not cached.encode_prompts(texts):
                    wrong.append("ids")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_raw_prompts_get_the_models_own_special_tokens() -> None:
    cached = tokens.Tokenizer(_tokenizer("bytes"), 100)
    (ids,) = cached.encode_prompts(["cat"])
    assert ids == _tokenizer("bytes")("cat")["input_ids"]
    assert ids[1:-1] == cached.encode_chats(["cat"])[0]
    assert cached.decode(ids) == "cat"
    assert cached.encode_prompts([]) == []


@pytest.mark.parametrize("kind", ["bytes", "bert", "prepend"])
def test_a_text_to_embed_keeps_its_first_tokens_and_all_special_ones(kind: str) -> None:
    cached = tokens.Tokenizer(_tokenizer(kind), 100)
    (whole,) = cached.encode_prompts(["the cat sat on the mat"])
    assert cached.special_tokens == 2
    for most in range(3, len(whole) + 2):
        (ids,) = cached.encode_inputs(["the cat sat on the mat"], most)
        assert ids == (whole if most >= len(whole) else whole[: most - 1] + whole[-1:])


def test_a_truncated_text_leaves_later_ones_whole() -> None:
    cached = tokens.Tokenizer(_tokenizer("bytes"), 100)
    (chat,), (prompt,) = cached.encode_chats(["the cat<s>sat"]), cached.encode_prompts(["the cat"])
    assert len(cached.encode_inputs(["the cat"], 3)[0]) == 3
    cached.encode_chats(["nothing"])
    assert len(cached.encode_inputs(["the cat"], 4)[0]) == 4
    assert (cached.encode_chats(["the cat<s>sat"])[0], cached.encode_prompts(["the cat"])[0]) == (
        chat,
        prompt,
    )


@pytest.mark.parametrize("content", [None, "not json", "{}", '{"version": "1.0"}'])
def test_a_directory_without_a_tokenizer_says_which_model(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    model = ModelSettings(source=str(tmp_path), context_tokens=10)
    with pytest.raises(errors.ModelUnavailable, match="'smol'"):
        tokens.Tokenizer.load("smol", model)


@pytest.mark.parametrize("source", ["./nowhere", "/nowhere/x.gguf", "a/b/c", "~nobody/x"])
def test_a_source_that_is_not_there_is_not_asked_of_the_hub(source: str) -> None:
    with pytest.raises(errors.ModelUnavailable, match="no such"):
        tokens.Tokenizer.load("smol", ModelSettings(source=source))


def test_the_context_is_the_smaller_of_config_and_tokenizer() -> None:
    class Config:
        def __init__(self, **known: Any) -> None:
            self.__dict__.update(known)

    class Declaring:
        def __init__(self, length: Any) -> None:
            self.model_max_length = length

    unlimited = Declaring(10**30)
    assert tokens.context_of(Config(max_position_embeddings=100), unlimited) == 100
    assert tokens.context_of(Config(n_positions=100), Declaring(50)) == 50
    assert tokens.context_of(Config(max_position_embeddings=100), Declaring(200)) == 100
    assert tokens.context_of(Config(), unlimited) == 1 << 20


_MANY_THREADS = """
import sys, threading
from pathlib import Path
from jobs import tokens
from jobs.model_settings import ModelSettings
model, failed = ModelSettings(source=sys.argv[1]), []
def load():
    try:
        tokens.cached("m", model)
    except Exception as error:
        failed.append(error)
threads = [threading.Thread(target=load) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.exit(repr(failed) if failed else 0)
"""


@pytest.mark.long
def test_threads_that_load_the_first_tokenizer_at_once_all_get_it(tmp_path: Path) -> None:
    # The race: transformers, half imported by one thread, is not whole for another.
    source = planning.save_tokenizer(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _MANY_THREADS, str(source)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
