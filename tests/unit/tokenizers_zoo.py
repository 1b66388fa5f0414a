"""Small tokenizers of each kind: byte-level, SentencePiece with and without byte fallback, WordPiece."""

from functools import lru_cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "Hello world, hello words; well, well. ",
    "naïve café, größer, 東京は今日も晴れ, привет мир 🙂🙃",
    '{"name": "f", "arguments": {"a": [1, 2.5, true]}}\n\n<tool_call></think> 12,345',
]
SPECIAL = ["<s>", "<|im_end|>", "<think>", "</think>"]


def _named(backend: Tokenizer) -> Tokenizer:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("é∑", special=False)])
    return backend


@lru_cache
def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: merges that end inside characters."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS * 3, trainer)
    return _named(backend)


@lru_cache
def sentence_piece(strip: bool = True) -> Tokenizer:
    """Like Llama 2 and Mistral (Gemma: without strip): a sign for spaces, tokens for bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    pieces = ["▁", "▁Hello", "▁world", "world", "▁▁", "lo", "東", "é", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary |= {piece: 256 + at for at, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    named = _named(backend)
    begin = ("<s>", named.token_to_id("<s>"))
    named.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    return named


@lru_cache
def metaspace() -> Tokenizer:
    """Like T5: SentencePiece without bytes."""
    pieces = ["<unk>", "▁", "▁Hello", "▁world", "lo", "東", "é", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _named(backend)


@lru_cache
def word_piece() -> Tokenizer:
    """Like BERT: what a token adds depends on its neighbours."""
    pieces = ["[UNK]", "hello", "world", "##lo", "##s", "東", "é", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _named(backend)


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentence_piece,
    "sentencepiece without strip": lambda: sentence_piece(False),
    "metaspace": metaspace,
    "wordpiece": word_piece,
}
EXACT = [kind for kind in KINDS if kind != "wordpiece"]
