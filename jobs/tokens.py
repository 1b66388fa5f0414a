"""A model's tokenizer. transformers is imported when one is loaded, not before."""

import gc
import json
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from jobs import errors, template
from jobs.model_settings import ModelSettings

_CACHED_SEGMENT_CHARACTERS = 256
_CACHE_CHARACTERS = 4_000_000

_importing, _loading = threading.Lock(), threading.Lock()


class Tokenizer:
    """Text to token ids and back, for one model; `template` makes chats to text."""

    def __init__(
        self, tokenizer: Any, context_tokens: int, chats: template.ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self.template = chats or template.ChatTemplate(tokenizer)
        # Fast tokenizers refuse to be used by two threads at once ("Already borrowed").
        self._lock = threading.Lock()
        self._segments = _Segments(tokenizer) if _splits_at_special_tokens(tokenizer) else None
        self.context_tokens = context_tokens
        self.vocabulary = len(tokenizer)

    @classmethod
    def load(cls, name: str, model: ModelSettings) -> Self:
        """Load tokenizer, template and context length, without the weights; raises ModelUnavailable."""
        try:
            location, options = locate(model)
            import_transformers()
            from transformers import AutoConfig, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(location, **options)
            config = None if model.context_tokens else AutoConfig.from_pretrained(location, **options)
            if model.chat_template is not None:
                tokenizer.chat_template = template.read(model.chat_template)
        except Exception as error:  # a tokenizer file that is not one raises a bare Exception
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise errors.ModelUnavailable(name=name, source=model.source, reason=reason) from None
        # transformers stays for good: going through its objects at each collection slows a plan by a tenth.
        gc.freeze()
        own = template.ChatTemplate(tokenizer, model.tool_format, model.reasoning)
        return cls(tokenizer, model.context_tokens or context_of(config, tokenizer), own)

    def encode_chats(self, texts: list[str]) -> list[list[int]]:
        """Encode rendered chats: their special tokens are in the text already."""
        if self._segments is None:
            return self._encode(texts, special=False)
        with self._lock:
            return self._segments.encode(texts)

    def encode_prompts(self, texts: list[str]) -> list[list[int]]:
        """Encode raw prompts, with the special tokens that the model puts around them."""
        return self._encode(texts, special=True)

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        if not texts:
            return []
        with self._lock:
            encoded = self._tokenizer(texts, add_special_tokens=special, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def encode_inputs(self, texts: list[str], most: int) -> list[list[int]]:
        """Encode texts to embed, the first `most` tokens of each, special tokens counted and kept."""
        with self._lock:
            self._tokenizer.truncation_side = "right"
            try:
                encoded = self._tokenizer(texts, truncation=True, max_length=most, verbose=False)
            finally:
                if self._segments is not None:
                    self._segments.reset()
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    @property
    def special_tokens(self) -> int:
        """How many special tokens the model puts around a raw prompt."""
        return int(self._tokenizer.num_special_tokens_to_add())

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, without special tokens."""
        with self._lock:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class _Segments:
    """Encode text piece by piece between special tokens, and remember long pieces.

    A tokenizer splits at special tokens before anything else, so the pieces are independent; a system prompt
    that every request of a job repeats is encoded once. Only for tokenizers that `_splits_at_special_tokens`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self.reset()
        self._ids = {token.content: id for id, token in self._backend.get_added_tokens_decoder().items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._characters = 0

    def reset(self) -> None:
        """Forget truncation and padding, which the backend remembers of whoever used it before."""
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, texts: list[str]) -> list[list[int]]:
        split = [[piece for piece in self._splitter.split(text) if piece] for text in texts]
        fresh = list({p for pieces in split for p in pieces if p not in self._ids and p not in self._known})
        encodings = self._backend.encode_batch_fast(fresh, add_special_tokens=False)
        new = {piece: encoding.ids for piece, encoding in zip(fresh, encodings, strict=True)}
        result = []
        for pieces in split:
            prompt: list[int] = []
            for piece in pieces:
                prompt.extend(self._ids_of(piece, new))
            result.append(prompt)
        self._remember(new)
        return result

    def _ids_of(self, piece: str, new: dict[str, list[int]]) -> Sequence[int]:
        if piece in self._ids:
            return (self._ids[piece],)
        if piece in new:
            return new[piece]
        self._known.move_to_end(piece)
        return self._known[piece]

    def _remember(self, new: dict[str, list[int]]) -> None:
        for piece, ids in new.items():
            if len(piece) >= _CACHED_SEGMENT_CHARACTERS:
                self._known[piece] = ids
                self._characters += len(piece)
        while self._characters > _CACHE_CHARACTERS:
            self._characters -= len(self._known.popitem(last=False)[0])


def _splits_at_special_tokens(tokenizer: Any) -> bool:
    """Tell whether encoding the pieces between added tokens one by one gives exactly the ids of the whole."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "split_special_tokens", False):
        return False
    added = list(backend.get_added_tokens_decoder().values())
    if not added or any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added):
        return False
    # Metaspace may treat the first piece of a text in another way than the rest.
    pipeline = json.loads(backend.to_str())
    if "Metaspace" in json.dumps([pipeline["pre_tokenizer"], pipeline["normalizer"]]):
        return False
    return _agrees(tokenizer, [token.content for token in added])


def _agrees(tokenizer: Any, special: list[str]) -> bool:
    """Try it, as a class of transformers may do more around its backend than can be read from it."""
    pieces = ["", " Two  words", "\nline\n", "É9 ", "x"]
    texts = ["".join(f"{piece}{token}" for piece in pieces) + "end" for token in special[:8]]
    whole = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return bool(_Segments(tokenizer).encode(texts) == whole)


def locate(model: ModelSettings) -> tuple[str, dict[str, Any]]:
    """Return what `from_pretrained` takes for a source: (hub id or directory, options); raises OSError."""
    options: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    path = Path(os.path.expanduser(model.source))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FileNotFoundError("no such file")
        return str(path.parent), options | {"gguf_file": path.name}
    if path.is_dir():
        return str(path), options
    if model.source.startswith((".", "/", "~")) or model.source.count("/") > 1:
        raise FileNotFoundError("no such directory")
    return model.source, options | {"revision": model.revision, "local_files_only": offline()}


def offline() -> bool:
    """Tell whether the environment forbids to fetch from a hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}


def context_of(config: Any, tokenizer: Any) -> int:
    """Return a model's context in tokens: the smaller of what its config and its tokenizer say."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    limits = [limit for limit in known if isinstance(limit, int) and limit > 0][:1]
    declared = getattr(tokenizer, "model_max_length", None)
    if isinstance(declared, int) and 0 < declared < 10**9:
        limits.append(declared)
    return min(limits, default=1 << 20)


def import_transformers() -> None:
    """Import it in one thread at a time: half imported by one, it is not whole for another."""
    with _importing:
        import transformers  # noqa: F401

        # They print lines of their own beside ours; a log of JSON has no place for these.
        for name in ("huggingface_hub", "transformers"):
            logging.getLogger(name).handlers.clear()
            logging.getLogger(name).propagate = True


def cached(name: str, model: ModelSettings) -> Tokenizer:
    """Return the tokenizer of a served model, loaded once per process."""
    with _loading:
        return _cached(name, model)


@lru_cache(maxsize=8)
def _cached(name: str, model: ModelSettings) -> Tokenizer:
    return Tokenizer.load(name, model)
