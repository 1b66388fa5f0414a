"""One row of a batch: takes token after token and knows when it has ended, and with what text."""

import functools
import logging

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from worker.engine import device_errors, grammar, logprobs, stop
from worker.engine.penalties import Adjustments
from worker.engine.types import Completion, FinishReason, Row, Timings, TokenLogprobs

log = logging.getLogger(__name__)
# Positions of a prompt: float64 copies of their logits are taken.
_SCORED_AT_ONCE = 256
NOT_FINITE = "the model's logits are not finite numbers"


class RowState:
    """Turns the tokens sampled for one row into its completion, by the row's own parameters."""

    def __init__(
        self,
        row: Row,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        grammars: grammar.Grammars | None = None,
    ) -> None:
        self.row = row
        self.done = False
        self.failure: str | None = None
        """Why no token can be taken from its last logits."""
        self._tokenizer = tokenizer
        wanted = row.request.sampling
        special = _special_tokens(tokenizer, wanted.stop)
        self.end_ids = frozenset(special.values()) | (frozenset() if wanted.ignore_eos else eos_ids)
        texts = tuple(text for text in wanted.stop if text not in special)
        self._matcher = stop.StopMatcher(self._decode, texts, wanted.min_tokens)
        self.logprobs: list[TokenLogprobs] = []
        scored = len(row.request.prompt_ids) if wanted.prompt_logprobs else 0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None] * scored
        self.constraint: grammar.Constraint | None = None
        if wanted.grammar is not None:
            assert grammars is not None
            try:
                self.constraint = grammars.open(wanted.grammar)
            except Exception as error:  # the other rows are not to fail with it
                self.failure = one_line(error)

    @functools.cached_property
    def adjustments(self) -> Adjustments | None:
        """How its logits change. Made for the first token: they count the prompt, and many rows may wait."""
        return Adjustments.of(self.row.request.sampling, self.row.request.prompt_ids, self.row.token_ids)

    @property
    def compiling(self) -> bool:
        """Whether its grammar is being compiled: to choose its token now would be to wait for that."""
        return self.constraint is not None and not self.constraint.compiled

    def prepare(self) -> None:
        """Start to compute what its first token may be, once the row is about to run."""
        if self.constraint is None or self.failure is not None:
            return
        try:
            self.constraint.prepare()
        except Exception as error:  # the other rows are not to fail with it
            self.failure = one_line(error)

    @property
    def unscored(self) -> bool:
        """Whether log probabilities of its prompt are wanted and not known yet."""
        return None in self.prompt_logprobs[1:]

    @property
    def may_end(self) -> bool:
        """Whether the token about to be chosen may be one that ends the row."""
        return len(self.row.token_ids) + 1 >= self.row.request.sampling.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether its token is chosen from other logits than the model's own."""
        masked = bool(self.end_ids) and not self.may_end
        return masked or self.adjustments is not None or self.constraint is not None

    def note_logprobs(self, found: TokenLogprobs) -> None:
        """Note the log probabilities of the token about to be taken; again, if it was not taken."""
        self.logprobs[len(self.row.token_ids) :] = [found]

    def score_prompt(self, first: int, logits: Tensor) -> None:
        """Note the log probabilities of the prompt's tokens after position `first`, from the logits [n, V] of
        it and the positions after it. A failure is this row's alone.
        """
        try:
            if not bool(logits.amax(-1).isfinite().all()):
                self.failure = NOT_FINITE
                return
            for block in logits.split(_SCORED_AT_ONCE):
                following = self.row.request.prompt_ids[first + 1 : first + 1 + len(block)]
                most = [self.row.request.sampling.logprobs or 0] * len(following)
                found = logprobs.of_tokens(block, following, most)
                self.prompt_logprobs[first + 1 : first + 1 + len(found)] = found
                first += len(found)
        except Exception as error:  # whatever it is, the other rows go on
            if device_errors.is_lost(error) or device_errors.is_out_of_memory(error):
                raise
            self.failure = one_line(error)

    def take(self, token_id: int, now: float) -> Completion | None:
        """Take the next token; return the completion when it was the last one. Never raises: what goes wrong
        is this row's error.
        """
        if self.failure is not None:
            return self._completion("error", "", now, self.failure)
        try:
            return self._take(token_id, now)
        except Exception as error:  # a grammar or a tokenizer may raise anything; the other rows go on
            log.warning("row failed", extra={"request": self.row.id}, exc_info=True)
            return self._completion("error", "", now, one_line(error))

    def _take(self, token_id: int, now: float) -> Completion | None:
        row, adjustments = self.row, self.adjustments
        row.token_ids.append(token_id)
        if row.first_token is None:
            row.first_token = now
        if token_id in self.end_ids:
            return self._completion("stop", self._decode(row.token_ids[:-1]), now)
        before = self._matcher.text_before_stop(row.token_ids)
        if before is not None:
            return self._completion("stop", before, now)
        if self.constraint is not None and self.constraint.take(token_id):
            return self._completion("stop", self._decode(row.token_ids), now)
        if len(row.token_ids) >= row.max_tokens:
            text = self._decode(row.token_ids)
            before = self._matcher.cut(text)
            return (
                self._completion("length", text, now)
                if before is None
                else self._completion("stop", before, now)
            )
        if adjustments is not None:
            adjustments.take(token_id)
        if self.constraint is not None:
            self.constraint.prepare()
        return None

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _completion(
        self, reason: FinishReason, text: str, now: float, error: str | None = None
    ) -> Completion:
        row, wanted = self.row, self.row.request.sampling
        timings = Timings(row.admitted, row.first_token, now)
        return Completion(
            row.id,
            list(row.token_ids),
            text,
            reason,
            0,
            timings,
            error,
            logprobs=None if wanted.logprobs is None else self.logprobs,
            prompt_logprobs=self.prompt_logprobs if wanted.prompt_logprobs else None,
            padding_tokens=row.padding_tokens,
        )


def one_line(error: Exception) -> str:
    """Return an exception as one line."""
    return f"{type(error).__name__}: {error}".split("\n")[0]


def _special_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> dict[str, int]:
    """Return the stop strings that are special tokens: they never show in the text, but stop by their id."""
    if not stop:
        return {}
    added = tokenizer.get_added_vocab()
    return {text: added[text] for text in stop if text in added}
