"""Stop strings: found in the text, not in the tokens, so it does not matter where tokens begin and end."""

from collections.abc import Callable

_INCOMPLETE = "\ufffd"


class StopMatcher:
    """Watches the growing output of one row for its stop strings.

    Decodes only a few tokens at each step: the last ones, with the one before them as context.
    A match must end in what the `min_tokens`-th token or a later one brought.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: tuple[str, ...], min_tokens: int = 0
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._min_tokens = min_tokens
        self._text = ""
        self._blind = 0
        self._context = 0
        self._read = 0
        self._before = ""

    def text_before_stop(self, token_ids: list[int]) -> str | None:
        """Return the text before the first stop string, or None yet. Call it after every token."""
        if not self._stop:
            return None
        now = self._decode(token_ids[self._context :])
        fresh = now[len(self._before) :]
        complete = fresh.rstrip(_INCOMPLETE)
        old = len(self._text)
        visible = self._text + complete
        if fresh and complete == fresh:
            # A token that ends inside a character holds the text back until the character is whole.
            self._text = visible
            self._context, self._read = self._read, len(token_ids)
            self._before = self._decode(token_ids[self._context : self._read])
        if len(token_ids) < self._min_tokens:
            self._blind = len(visible)
            return None
        if self._find(visible, old) is None:
            return None
        # The whole output decoded at once is the text that a user would see: cut that one.
        whole = self._decode(token_ids)
        kept = self.cut(whole)
        return visible[: self._find(visible, 0)] if kept is None else kept

    def cut(self, text: str) -> str | None:
        """Return the whole text of a row cut at a stop string, or None if none is in it.

        A last check: the decoding of some tokenizers depends on more context than is looked at above.
        """
        found = self._find(text, 0)
        return None if found is None else text[:found]

    def _find(self, text: str, start: int) -> int | None:
        start = max(start, self._blind)
        found = [text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stop]
        return min((position for position in found if position >= 0), default=None)
