"""Where each token of a text begins, and its bytes."""

import codecs
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, takewhile
from typing import Any

from worker import token_bytes

_CONTEXT_TOKENS = 4
_TRIED_TOKENS = 64
_MARK = 0xD800
"""From here on, characters that no valid text has: one that stands for so many invalid bytes."""


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return chr(_MARK + error.end - error.start), error.end


codecs.register_error("longhaul.mark", _mark)


@dataclass(frozen=True)
class Measured:
    """A text, the bytes each of its tokens brought (b"" if it is hidden), and the character it begins in.

    `starts` has one more entry, the text's length. A token inside a character begins where that does.
    """

    text: str
    pieces: list[bytes]
    starts: list[int]

    @cached_property
    def first(self) -> int:
        """The place of the first token that brought anything."""
        return next((place for place, piece in enumerate(self.pieces) if piece), 0)

    def before(self, characters: int) -> list[int]:
        """Return the places of the tokens that have a share in the first characters of the text."""
        found = zip(self.pieces, self.starts, strict=False)
        return [place for place, (piece, start) in enumerate(found) if piece and start < characters]


class TokenText:
    """Measures texts of one tokenizer, of transformers or of `tokenizers` itself.

    Special tokens are hidden: they are not in the text. For a tokenizer whose decoder is not known, the bytes
    of a token are what the text gains by it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        fast = hasattr(self._backend, "id_to_token")
        added = self._backend.get_added_tokens_decoder() if fast else tokenizer.added_tokens_decoder
        self.special = {id: token.content for id, token in added.items() if token.special}
        self._pieces: dict[int, bytes] = {}
        self._decoder = token_bytes.read(self._backend) if fast else None
        if self._decoder is not None and not self._agrees():
            self._decoder, self._pieces = None, {}

    @cached_property
    def typed(self) -> frozenset[int]:
        """The special tokens that stand in a prompt because somebody wrote them, not around any text."""
        around = self._tokenizer.encode("")
        return frozenset(self.special) - frozenset(getattr(around, "ids", around))

    @property
    def strips(self) -> bool:
        """Whether the decoded text may lack a space that it begins with."""
        return self._decoder is None or self._decoder.strips

    def piece(self, id: int) -> bytes:
        """Return the bytes of a token inside a text, of a special one its name."""
        if id not in self._pieces:
            self._pieces[id] = self._bytes_of(id)
        return self._pieces[id]

    def first_piece(self, id: int) -> bytes:
        """Return the bytes of a token that begins a text, of a special one its name."""
        return self.measure([id], shown=(id,)).pieces[0]

    def measure(self, ids: Sequence[int], shown: Collection[int] = (), continues: bool = False) -> Measured:
        """Decode tokens as the tokenizer does, but with the special ones that are `shown`.

        If it `continues` another text, no space at its start is left out.
        """
        places = [place for place, id in enumerate(ids) if id not in self.special or id in shown]
        visible = [ids[place] for place in places]
        pieces = self._read(visible, continues)
        characters = self._characters(visible, pieces)
        text = "".join(characters).translate(_REPLACED)
        ends = list(accumulate(map(_width, characters)))
        whole, starts = [b""] * len(ids), []
        for place, piece in zip(places, pieces, strict=True):
            whole[place] = piece
        for begin in accumulate(map(len, whole), initial=0):
            starts.append(bisect_right(ends, begin))
        return Measured(text, whole, starts)

    def _read(self, ids: list[int], continues: bool) -> list[bytes]:
        """Return the bytes that each of some tokens brings to their text."""
        if self._decoder is None:
            return self._gained(ids)
        pieces = [self.piece(id) for id in ids]
        if continues or not self._begins_with_text(ids, pieces):
            return pieces
        return self._decoder.without_lead(pieces)

    def _begins_with_text(self, ids: list[int], pieces: list[bytes]) -> bool:
        """Tell whether a text begins with characters: byte tokens that are none of any text lose no space."""
        decoder = self._decoder
        if decoder is None or not decoder.byte_fallback:
            return True
        run = takewhile(lambda one: decoder.is_byte(self._token(one[0])), zip(ids, pieces, strict=True))
        try:
            b"".join(piece for _, piece in run).decode()
        except UnicodeDecodeError:
            return False
        return True

    def _characters(self, ids: list[int], pieces: list[bytes]) -> list[str]:
        """Return the characters of a text; a mark stands for bytes that are none."""
        if self._decoder is None or not self._decoder.byte_fallback:
            return list(b"".join(pieces).decode(errors="longhaul.mark"))
        characters: list[str] = []
        alone = [self._decoder.is_byte(self._token(id)) for id in ids]
        for is_bytes, run in groupby(zip(alone, pieces, strict=True), key=lambda one: one[0]):
            data = b"".join(piece for _, piece in run)
            try:
                characters += data.decode()
            except UnicodeDecodeError:
                # A run of byte tokens is one text or none: each of them counts as an invalid character.
                assert is_bytes
                characters += [chr(_MARK + 1)] * len(data)
        return characters

    def _bytes_of(self, id: int) -> bytes:
        if id in self.special:
            return str(self.special[id]).encode()
        if self._decoder is None:
            return self._decode([id]).encode()
        return self._decoder.bytes_of(self._token(id))

    def _token(self, id: int) -> str:
        """Return a token as the vocabulary has it; a model may have more ids, which stand for nothing."""
        return str(self._backend.id_to_token(id) or "")

    def _gained(self, ids: list[int]) -> list[bytes]:
        """Return what the text gains by each token, seen with a few tokens before it."""
        gained = []
        for place, id in enumerate(ids):
            if id in self.special:
                gained.append(self.piece(id))
                continue
            context = ids[max(0, place - _CONTEXT_TOKENS) : place]
            before, now = self._decode(context), self._decode([*context, id])
            gained.append(now[len(before) :].encode() if now.startswith(before) else self.piece(id))
        return gained

    def _decode(self, ids: list[int]) -> str:
        # The backend's tokenizer cleans nothing up; that of transformers is asked not to.
        options = {} if self._tokenizer is self._backend else {"clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, **options))

    def _agrees(self) -> bool:
        """Try the decoder that was read: a class of transformers may do more around it than it shows."""
        size = self._backend.get_vocab_size()
        ids = list(range(0, size, max(1, size // _TRIED_TOKENS)))
        return all(self.measure(tried).text == self._decode(tried) for tried in (ids, ids[::-1], ids[1:2]))


_REPLACED = {_MARK + count: "\ufffd" for count in range(1, 5)}


def _width(character: str) -> int:
    """Return how many bytes a character takes, or a mark stands for."""
    code = ord(character)
    return code - _MARK if _MARK < code < _MARK + 5 else 1 + (code > 0x7F) + (code > 0x7FF) + (code > 0xFFFF)
