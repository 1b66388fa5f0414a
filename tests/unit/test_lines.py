import io

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import lines

_PIECES = st.sampled_from(
    [
        b"a",
        b"xyz",
        b" ",
        b"\t",
        b"\r",
        b"\n",
        b"\r\n",
        b"\n\n",
        lines.BOM,
        b"\x0b",
        b"\x0c",
        b"\xc2\x85",
        b"\x00",
        "\u2028".encode(),
        "\u2029".encode(),
        b"\xff",
    ]
)


def _by_hand(data: bytes, limit: int) -> list[lines.Line]:
    found = []
    for number, line in enumerate(data.split(b"\n"), 1):
        line = line.removeprefix(lines.BOM) if number == 1 else line
        line = line.removesuffix(b"\r")
        if len(line) > limit:
            found.append(lines.Line(number, None))
        elif line.strip(b" \t\r"):
            found.append(lines.Line(number, line.strip(b" \t\r")))
    return found


@given(st.lists(_PIECES, max_size=40).map(b"".join), st.integers(1, 12))
def test_any_bytes_are_read_as_split_at_newlines_by_hand(data: bytes, limit: int) -> None:
    assert list(lines.read(io.BytesIO(data), limit)) == _by_hand(data, limit)


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_other_line_separators_inside_a_string_are_text(separator: str) -> None:
    data = f'{{"a":"x{separator}y"}}\n'.encode()
    assert list(lines.read(io.BytesIO(data), 100)) == [lines.Line(1, data.strip(b"\n"))]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_a_byte_order_mark_is_dropped_whatever_ends_the_line(end: bytes) -> None:
    assert list(lines.read(io.BytesIO(lines.BOM + b"{}" + end), 2)) == [lines.Line(1, b"{}")]


def test_blank_lines_are_counted_but_not_read() -> None:
    data = b"a\n\n   \n\t\r\nb\n\n"
    assert list(lines.read(io.BytesIO(data), 100)) == [lines.Line(1, b"a"), lines.Line(5, b"b")]


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_the_limit_counts_a_line_without_its_end(end: bytes) -> None:
    assert list(lines.read(io.BytesIO(b"12345" + end), 5)) == [lines.Line(1, b"12345")]
    assert list(lines.read(io.BytesIO(b"123456" + end), 5)) == [lines.Line(1, None)]


def test_a_line_over_the_limit_is_never_held_and_the_next_is_read() -> None:
    class Counting(io.BytesIO):
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            data = super().readline(size)
            self.longest = max(self.longest, len(data))
            return data

    stream = Counting(b"x" * 100_000 + b"\nok")
    assert list(lines.read(stream, 1000)) == [lines.Line(1, None), lines.Line(2, b"ok")]
    assert stream.longest < 1100


@given(st.recursive(st.none() | st.booleans() | st.text() | st.integers(-(2**53), 2**53), st.lists))
def test_a_json_value_is_parsed_to_itself(value: object) -> None:
    assert lines.parse(orjson.dumps(value)) == lines.Parsed(value)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"{]",
        b'{"a":}',
        b"NaN",
        b'{"a":Infinity}',
        b"-Infinity",
        b"{} {}",
        b"'a'",
        b'"\xff"',
        b'"\t"',
        '"☃"'.encode("utf-16"),
        '{"a":1}'.encode("utf-16-le"),
        b"[" * 100000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_not_json_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+ at column \d+|byte \d+ is not UTF-8"):
        lines.parse(data)


@pytest.mark.parametrize("data", [b'"\\ud83d"', b'{"\\udc00":1}', b'[{"a":["\\ud83dx"]}]'])
def test_half_a_surrogate_pair_is_json_without_being_text(data: bytes) -> None:
    assert "surrogate" in (lines.parse(data).fault or "")


@pytest.mark.parametrize(
    "data", [b"1e999", b'{"a":[-1e999]}', b"1" + b"0" * 400, b"1" * 5000, b"-" + b"9" * 400]
)
def test_a_number_beyond_floats_is_json_that_nobody_can_run(data: bytes) -> None:
    assert "beyond the range" in (lines.parse(data).fault or "")


@pytest.mark.parametrize("number", [0, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**300, 1e-400, -0.5])
def test_numbers_are_the_same_where_orjson_does_not_read_the_line(number: float) -> None:
    odd = lines.parse(b'[%s, "\\ud83d"]' % str(number).encode()).value[0]
    plain = lines.parse(b"[%s]" % str(number).encode()).value[0]
    assert (type(odd), odd) == (type(plain), plain)


@pytest.mark.parametrize("data", [b'"\\ud83d\\ude00"', b'"\\u0000"', b'["' + b"[" * 500 + b'"]', b"1e-999"])
def test_odd_but_good_json_has_no_fault(data: bytes) -> None:
    assert lines.parse(data).fault is None


@pytest.mark.parametrize(("levels", "fine"), [(200, True), (201, False), (900, False), (1000, False)])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_deep_nesting_is_a_fault_of_the_line_alone(
    levels: int, fine: bool, opening: bytes, closing: bytes
) -> None:
    inner = b"1" if opening != b"[" else b""
    assert (lines.parse(opening * levels + inner + closing * levels).fault is None) == fine
