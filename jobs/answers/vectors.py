"""Embeddings as an answer has them: cut to the dimensions asked for, as numbers or as base64."""

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from jobs import errors


def data(vectors: Sequence[Sequence[float]], params: dict[str, Any]) -> list[dict[str, Any]]:
    """Return `data` of an embeddings answer; raises ParameterRefused (dimensions) and UnusableOutput."""
    import numpy as np  # only what ran a model gets here; the other processes do without

    found = np.asarray(vectors, dtype=np.float64)
    if not np.isfinite(found).all():
        raise errors.UnusableOutput(what="embeddings that are not numbers")
    if (dimensions := params.get("dimensions")) is not None:
        found = _cut(found, dimensions)
    write = _base64 if params.get("encoding") == "base64" else _numbers
    rows = found.astype("<f4")
    return [
        {"object": "embedding", "index": index, "embedding": write(row)} for index, row in enumerate(rows)
    ]


def _cut(vectors: Any, dimensions: int) -> Any:
    """Return the first numbers of each vector, at unit length (Kusupati et al. 2022)."""
    import numpy as np

    if dimensions > vectors.shape[1]:
        message = f"dimensions={dimensions} is more than the {vectors.shape[1]} that this model has."
        raise errors.ParameterRefused(message, param="dimensions")
    kept = vectors[:, :dimensions]
    length = np.linalg.norm(kept, axis=1, keepdims=True)
    return kept / np.where(length > 0, length, 1)


def _numbers(vector: Any) -> list[float]:
    # orjson writes the shortest decimals that give the same float32, half as long as those of a float64.
    numbers: list[float] = orjson.loads(orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY))
    return numbers


def _base64(vector: Any) -> str:
    return base64.b64encode(vector.tobytes()).decode()
