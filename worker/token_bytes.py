"""The bytes that a tokenizer's tokens stand for, read from its decoder.

Known are byte-level decoders (GPT-2, Llama 3, Qwen) and those of SentencePiece models: a sign for the space,
and tokens such as <0x0A> for bytes (Llama 2, Mistral, Gemma, T5).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: those that cannot be printed are moved up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(moved)}


_BYTES = _alphabet()


@dataclass(frozen=True)
class Decoder:
    """How tokens become text.

    `byte_level`: each character of a token is a byte. Else `replace` pairs are replaced in each token,
    `byte_fallback` tokens are bytes, and at the start of a text up to `strip` spaces are left out, or all of
    its first token (`strip` None).
    """

    byte_level: bool = False
    replace: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: int | None = 0

    @property
    def strips(self) -> bool:
        """Whether it leaves out a space that begins a text."""
        return self.strip != 0

    def is_byte(self, token: str) -> bool:
        """Tell whether a token is one byte, to be joined with those beside it."""
        return self.byte_fallback and _BYTE.fullmatch(token) is not None

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token inside a text."""
        if self.byte_level:
            if all(character in _BYTES for character in token):
                return bytes(_BYTES[character] for character in token)
            return token.encode()
        if self.is_byte(token):
            return bytes([int(token[3:5], 16)])
        for sign, text in self.replace:
            token = token.replace(sign, text)
        return token.encode()

    def without_lead(self, pieces: list[bytes]) -> list[bytes]:
        """Return the pieces of a text without the spaces that are left out at its start."""
        if self.strip is None:
            return [pieces[0].replace(b" ", b""), *pieces[1:]] if pieces else []
        left, stripped = self.strip, []
        for piece in pieces:
            kept = piece
            while left and kept.startswith(b" "):
                kept, left = kept[1:], left - 1
            left = 0 if kept else left
            stripped.append(kept)
        return stripped


def read(backend: Any) -> Decoder | None:
    """Return the decoder of a `tokenizers.Tokenizer`; None if it does what is not known here."""
    if backend.decoder is None:
        return None
    found = json.loads(backend.decoder.__getstate__())
    steps = found["decoders"] if found["type"] == "Sequence" else [found]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return Decoder(byte_level=True)
    if [step["type"] for step in steps] == ["Metaspace"]:
        never = steps[0].get("prepend_scheme") == "never"
        return Decoder(replace=((steps[0]["replacement"], " "),), strip=0 if never else None)
    return _sentence_piece(steps)


def _sentence_piece(steps: list[dict[str, Any]]) -> Decoder | None:
    """Return the decoder of Replace..., ByteFallback, Fuse, Strip; the last ones need not be there."""
    replace, fallback, strip, fused = [], False, 0, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": sign}, "content": text} if not fused:
                replace.append((sign, text))
            case {"type": "ByteFallback"} if not fused:
                fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": strip, "stop": 0} if fused:
                pass
            case _:
                return None
    return Decoder(replace=tuple(replace), byte_fallback=fallback, strip=strip)
