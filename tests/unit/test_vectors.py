import base64
import math
import struct

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import errors
from jobs.answers import vectors

NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_numbers_and_base64_say_the_same_float32(vector: list[float]) -> None:
    (plain,) = vectors.data([vector], {})
    (packed,) = vectors.data([vector], {"encoding": "base64"})
    read = orjson.loads(orjson.dumps(plain))["embedding"]
    assert list(np.float32(read)) == list(np.float32(vector))
    assert (plain["object"], plain["index"]) == ("embedding", 0)
    data = base64.b64decode(packed["embedding"])
    assert list(struct.unpack(f"<{len(vector)}f", data)) == vector


def test_numbers_are_no_longer_than_they_must_be() -> None:
    (found,) = vectors.data([[float(np.float32(0.1))]], {"encoding": "float"})
    assert orjson.dumps(found["embedding"]) == b"[0.1]"


def test_fewer_dimensions_are_cut_and_have_unit_length() -> None:
    cut = [one["embedding"] for one in vectors.data([[3.0, 4.0, 12.0], [0.0, 0.0, 1.0]], {"dimensions": 2})]
    assert cut[0] == pytest.approx([0.6, 0.8], abs=1e-7)
    assert cut[1] == [0.0, 0.0]
    assert [one["index"] for one in vectors.data([[1.0], [2.0]], {})] == [0, 1]


def test_more_dimensions_than_the_model_has_are_refused() -> None:
    with pytest.raises(errors.ParameterRefused, match=r"dimensions=4 .* 3 ") as refused:
        vectors.data([[1.0, 2.0, 3.0]], {"dimensions": 4})
    assert refused.value.param == "dimensions"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_json_cannot_say_is_refused(bad: float) -> None:
    with pytest.raises(errors.UnusableOutput, match="not numbers"):
        vectors.data([[1.0], [bad]], {})
