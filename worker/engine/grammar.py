"""Which tokens may come next by a grammar (llguidance), computed beside the model's step."""

import functools
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import llguidance
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_REMEMBERED = 256
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BIASES = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""What each byte of a mask does to eight logits."""
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)
_MARKER = re.compile(r'^(\w+)(?:\[lazy\])?: (TEXT )?"([^"\\]*)"$', re.MULTILINE)
"""A rule that is a text, or any text up to it."""


class GrammarFailed(Exception):
    """A grammar cannot be compiled, or an output not be held to it; the message is one line."""


class Grammars:
    """Opens constraints over one model's vocabulary, each grammar compiled once.

    `vocabulary` is the number of logits; those beyond the tokenizer's tokens are never allowed. Each of
    `end_ids` may end an output where its grammar may end. Nothing is computed before a grammar is opened.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, end_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = vocabulary
        self._end_ids = frozenset(id for id in end_ids if id < vocabulary)
        self._tokens: _Tokens | None = None
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        # Compiling may take long, and must not hold up the masks of the rows that run.
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._masker = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) // 2)), "grammar-mask")

    def open(self, text: str) -> "Constraint":
        """Return a constraint for one output; its grammar is compiled in the background if it is new."""
        compiled = self._compiled.get(text)
        if compiled is None:
            compiled = self._compiler.submit(_guarded, lambda: self._compile(text))
            self._compiled[text] = compiled
        self._compiled.move_to_end(text)
        while len(self._compiled) > _REMEMBERED:
            self._compiled.popitem(last=False)
        return Constraint(compiled, self._masker, self.vocabulary, self._end_ids)

    def close(self) -> None:
        """Stop the threads. Constraints cannot be used any more; who waits for one hears of it."""
        self._compiler.shutdown(wait=True, cancel_futures=True)
        self._masker.shutdown(wait=True)  # not cancelled: whoever waits for a mask would do so for ever

    def _compile(self, text: str) -> llguidance.LLMatcher:
        if self._tokens is None:
            self._tokens = _Tokens(self._tokenizer, self.vocabulary, self._end_ids)
        matcher = llguidance.LLMatcher(
            self._tokens.known, self._tokens.rewritten(text), log_level=0, limits=_LIMITS
        )
        _check(matcher)
        matcher.compute_bitmask()  # what it learns of the vocabulary goes into every copy
        _check(matcher)
        return matcher


class Constraint:
    """Holds one output to a grammar, token by token; knows what was taken, so that it outlives a preemption.

    Each method raises GrammarFailed when the grammar, or the library on it, fails: for this output alone.
    """

    def __init__(
        self,
        compiled: "Future[llguidance.LLMatcher]",
        masker: ThreadPoolExecutor,
        vocabulary: int,
        end_ids: frozenset[int],
    ) -> None:
        self._compiled = compiled
        self._masker = masker
        self._vocabulary = vocabulary
        self._end_ids = end_ids
        self._matcher: llguidance.LLMatcher | None = None
        self._ready: Future[None] | None = None

    @property
    def compiled(self) -> bool:
        """Whether its grammar is compiled, or cannot be: until then `restrict` and `take` wait."""
        return self._compiled.done()

    def prepare(self) -> None:
        """Start to compute which tokens may come next; returns at once."""
        if self._ready is None:
            ready: Future[None] = Future()
            self._ready = ready
            # A future keeps its callbacks, and this one is remembered: what it calls once is not to be kept.
            once, masker = [functools.partial(self._compute, ready)], self._masker
            # Not waiting in the pool for the compiler: other rows need its threads.
            self._compiled.add_done_callback(lambda _: masker.submit(once.pop()))

    @torch.inference_mode()  # logits come from it, and may be changed in place only in it
    def restrict(self, logits: Tensor) -> None:
        """Set the logits [V] of tokens that may not come next to -inf, in place."""
        self.prepare()
        assert self._ready is not None
        self._ready.result()
        if logits.device.type == "cpu":
            logits.add_(self._mask.bias)  # several times as fast as filling by a mask
            return
        fill(logits, torch.from_numpy(self._mask.words))

    def take(self, token_id: int) -> bool:
        """Advance by a token; return True when the output is complete, so that nothing more can follow."""
        if self._ready is not None:
            self._ready.exception()  # the matcher is not to be used by two threads
            self._ready = None
        return _guarded(lambda: self._take(token_id))

    def _take(self, token_id: int) -> bool:
        matcher = self._opened()
        if token_id in self._end_ids:
            if not matcher.is_accepting():
                raise GrammarFailed("the output ended where its grammar cannot end")
            return True
        if not matcher.consume_token(token_id):
            _check(matcher)
            raise GrammarFailed(f"token {token_id} is not what the grammar allows")
        return matcher.is_stopped()

    def _opened(self) -> llguidance.LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        return self._matcher

    def _compute(self, ready: "Future[None]") -> None:
        try:
            _guarded(self._fill_mask)
        except GrammarFailed as error:
            ready.set_exception(error)
        else:
            ready.set_result(None)

    def _fill_mask(self) -> None:
        matcher, words = self._opened(), self._mask.words
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        _check(matcher)
        if not words.any():
            raise GrammarFailed("no token of the model continues what the grammar allows")
        self._mask.spread()

    @functools.cached_property
    def _mask(self) -> "_Mask":
        """Made for the first token: many constraints may wait, and a mask is four bytes a token."""
        return _Mask(self._vocabulary)


class _Mask:
    """Which tokens may come next: as `words` of 32 bits, and as the `bias` [V] that does it to logits.

    The buffers are not made anew for each token: fresh memory costs more than all the rest.
    """

    def __init__(self, vocabulary: int) -> None:
        self.words = np.empty((_padded(vocabulary) + 31) // 32, np.int32)
        self._biases = np.empty((self.words.nbytes, 8), np.float32)
        self.bias = torch.from_numpy(self._biases.reshape(-1)[:vocabulary])

    def spread(self) -> None:
        """Make the bias of the words."""
        np.take(_BIASES, self.words.view(np.uint8), axis=0, out=self._biases, mode="clip")


class _Tokens:
    """A model's tokens as llguidance knows them: the bytes that each adds to the text.

    Special tokens, which a decoder leaves out of the text, spell nothing: a grammar must name them. Other
    added tokens, such as a `<tool_call>` that is not special, are text like any.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, vocabulary: int, end_ids: frozenset[int]
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if tokenizer is None or backend is None:
            raise GrammarFailed("response_format and tools need a model with a fast tokenizer")
        spelled = llguidance.LLTokenizer(backend.to_str())
        known = min(spelled.vocab_size, vocabulary)
        added = backend.get_added_tokens_decoder()
        special = (
            {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids) | end_ids
        )
        self.tokens = [spelled.decode_bytes([id]) for id in range(known)]
        self.tokens += [b""] * (_padded(vocabulary) - known)
        self.special_token_ids = sorted(id for id in special if id < known)
        self.bos_token_id = None
        # The last of the padding, which no logit stands for, where the model has no end of its own.
        ends = sorted(end_ids) or [_padded(vocabulary) - 1]
        self.eos_token_id = ends[0]
        self.known = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), eos_token=ends)
        self._ids = {token.content: id for id, token in added.items() if id in special and id < known}

    def __call__(self, text: Any) -> list[int]:
        """Never needed by grammars that say no_forcing, as ours do."""
        raise NotImplementedError("a grammar that forces tokens")

    def rewritten(self, text: str) -> str:
        """Return a grammar in which rules that are the text of a special token are that token."""

        def rewrite(rule: re.Match[str]) -> str:
            name, before, marker = rule.groups()
            return f"{name}: {before or ''}<[{self._ids[marker]}]>" if marker in self._ids else rule[0]

        return _MARKER.sub(rewrite, text)


def fill(logits: Tensor, words: Tensor) -> None:
    """Set logits [V] to -inf, on any device, where a token's bit in words [> V / 32] of 32 is not set."""
    words = words.to(logits.device)  # a bit a token: the least to send
    bits = words[:, None] >> torch.arange(32, device=logits.device, dtype=torch.int32) & 1
    logits.masked_fill_(bits.view(-1)[: len(logits)] == 0, -torch.inf)


def _padded(vocabulary: int) -> int:
    """Return how many tokens llguidance is told of: one more than there are logits."""
    return vocabulary + 1


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarFailed(" ".join(matcher.get_error().split())[:500])


def _guarded(call: Callable[[], T]) -> T:
    """Return what a call into the library returns; raises GrammarFailed for whatever it raises."""
    try:
        return call()
    except (GrammarFailed, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is not even an Exception
        reason = " ".join(str(error).split())[:500]
        raise GrammarFailed(f"{type(error).__name__}: {reason}") from error
