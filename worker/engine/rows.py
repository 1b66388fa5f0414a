"""One row of a batch: takes token after token and knows when it has ended, and with what text."""

from transformers import PreTrainedTokenizerBase

from worker.engine import stop
from worker.engine.types import Completion, FinishReason, Row, Timings


class RowState:
    """Turns the tokens sampled for one row into its completion, by the row's own parameters."""

    def __init__(self, row: Row, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> None:
        self.row = row
        self.done = False
        self.broken = False
        """Its last logits were not numbers, so that no token can be taken from them."""
        self._tokenizer = tokenizer
        wanted = row.request.sampling
        special = _special_tokens(tokenizer, wanted.stop)
        self.end_ids = frozenset(special.values()) | (frozenset() if wanted.ignore_eos else eos_ids)
        texts = tuple(text for text in wanted.stop if text not in special)
        self._matcher = stop.StopMatcher(self._decode, texts, wanted.min_tokens)

    @property
    def may_end(self) -> bool:
        """Whether the token about to be chosen may be one that ends the row."""
        return len(self.row.token_ids) + 1 >= self.row.request.sampling.min_tokens

    def take(self, token_id: int, now: float) -> Completion | None:
        """Take the next token; return the completion when it was the last one."""
        row = self.row
        if self.broken:
            return self._completion("error", "", now, "the model's logits are not finite numbers")
        row.token_ids.append(token_id)
        if row.first_token is None:
            row.first_token = now
        if token_id in self.end_ids:
            return self._completion("stop", self._decode(row.token_ids[:-1]), now)
        before = self._matcher.text_before_stop(row.token_ids)
        if before is not None:
            return self._completion("stop", before, now)
        if len(row.token_ids) >= row.max_tokens:
            text = self._decode(row.token_ids)
            before = self._matcher.cut(text)
            return (
                self._completion("length", text, now)
                if before is None
                else self._completion("stop", before, now)
            )
        return None

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _completion(
        self, reason: FinishReason, text: str, now: float, error: str | None = None
    ) -> Completion:
        row = self.row
        timings = Timings(row.admitted, row.first_token, now)
        return Completion(row.id, list(row.token_ids), text, reason, 0, timings, error)


def _special_tokens(tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> dict[str, int]:
    """Return the stop strings that are special tokens: they never show in the text, but stop by their id."""
    if not stop:
        return {}
    added = tokenizer.get_added_vocab()
    return {text: added[text] for text in stop if text in added}
