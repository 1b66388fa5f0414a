"""Inputs that are nearly right: seeds, changed a little or a lot, the same ones for the same seed."""

import copy
import random
from collections.abc import Sequence
from typing import Any

PIECES = [
    *(b"\xef\xbb\xbf", b"\r\n", b"\n", b"\r", b"\n\n\n", b"\xe2\x80\xa8", b"\xc2\x85", b"\x0b", b"\x00"),
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\\ud800", b"\\udc00", b"\\u0000", b"\\u2028", b"\\x", b"\\"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"-0.0", b"1e-999", b"9" * 25, b"-" + b"9" * 25),
    *(b"1.", b".5", b"0x1", b"01", b"null", b"true", b"false", b'""', b"{}", b"[]", b'"', b",", b":", b" "),
    *(b"[" * 250, b"{" * 5, b"]" * 5, b"}" * 5, b"[" * 1500, b'{"a":' * 1100, b"/*x*/", b"//", b"x" * 400),
    *(b'"custom_id":"a",', b'"body":null,', b'"stream":true,', b'"model":"m",', b'"method":"POST",'),
    *(b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"BZh9", b"\x28\xb5\x2f\xfd", b"\x80\x04\x95"),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 20, 255, 2**31, 2**53, 2**63 - 1, 2**64 - 1, -(2**63), 10**6),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -1.5, 1e308, -1e308, 5e-324, 1e16),
    *("", " ", "a", "auto", "none", "required", "user", "system", "assistant", "tool", "text", "function"),
    *(
        "json_object",
        "json_schema",
        "base64",
        "POST",
        "24h",
        "\0",
        "\u2028",
        "\U0001f600",
        "\u202e",
        "x" * 600,
    ),
    *("<think>", "</think>", "<tool_call>", "<|im_start|>", "{{ 1 }}", "{% for %}", "%s", "{}", "[1,2]"),
    *([], {}, [[]], [{}], [None], {"": None}, [0] * 50, ["x"] * 5, {"a": {"b": {"c": []}}}),
    *({"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}, {"type": "object"}),
]


class Mutator:
    """Makes inputs of seeds; `names` are keys that mean something."""

    def __init__(self, seed: int, names: Sequence[str] = ()) -> None:
        self.random = random.Random(seed)
        self._names = [*names, "", "a", "type", "text", "content", "role", "__class__", "x" * 100]

    def bytes(self, data: bytes, most: int = 4) -> bytes:
        """Change bytes in up to `most` places."""
        made = bytearray(data)
        for _ in range(self.random.randint(1, most)):
            at = self.random.randint(0, len(made))
            end = min(len(made), at + self.random.choice((0, 0, 1, 1, 2, 8, 40)))
            kind = self.random.randrange(5)
            if kind == 0:
                made[at:end] = self.random.choice(PIECES)
            elif kind == 1:
                made[at:end] = self.random.randbytes(self.random.randint(0, 4))
            elif kind == 2:
                del made[at:end]
            elif kind == 3:
                made[at:at] = made[at:end] * self.random.choice((1, 2, 30))
            elif made:
                made[at % len(made)] ^= 1 << self.random.randrange(8)
        return bytes(made)

    def value(self, seed: Any, most: int = 3) -> Any:
        """Change a JSON value in up to `most` places."""
        made = copy.deepcopy(seed)
        for _ in range(self.random.choice((1, 1, 2, most))):
            made = self._changed(made, self.random.randint(0, 5))
        return made

    def _changed(self, value: Any, levels: int) -> Any:
        if levels and isinstance(value, dict) and value:
            name = self.random.choice(list(value))
            value[name] = self._changed(value[name], levels - 1)
            return value
        if levels and isinstance(value, list) and value:
            at = self.random.randrange(len(value))
            value[at] = self._changed(value[at], levels - 1)
            return value
        if isinstance(value, dict) and self.random.random() < 0.7:
            return self._object(value)
        if isinstance(value, list) and self.random.random() < 0.5:
            return value * self.random.choice((0, 2, 2, 3)) + [self._any()]
        if isinstance(value, str) and self.random.random() < 0.3:
            return value + str(self.random.choice(VALUES))
        if isinstance(value, int | float) and self.random.random() < 0.3:
            made = min(max(value * self.random.choice((-1, 2, 10, 0.5)), -1e300), 1e300)
            # What is read is within 64 bits: a larger integer becomes a float.
            return made if isinstance(made, float) or -(2**63) <= made < 2**64 else float(made)
        return self._any()

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        if value and self.random.random() < 0.3:
            del value[self.random.choice(list(value))]
        else:
            value[self.random.choice(self._names)] = self._any()
        return value

    def _any(self) -> Any:
        made = copy.deepcopy(self.random.choice(VALUES))
        if self.random.random() < 0.02:
            for _ in range(self.random.choice((3, 100, 250))):
                made = [made] if self.random.random() < 0.5 else {"a": made}
        return made
