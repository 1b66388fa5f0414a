"""The body of an embedding request."""

from typing import Any, Literal

from pydantic import Field, field_validator

from jobs.bodies.base import Body, wrong

MOST_INPUTS = 2048


class EmbeddingBody(Body):
    """One text or several, or their token ids; `input` becomes an array of either."""

    input: list[str] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)

    @field_validator("input", mode="plain")
    @classmethod
    def _inputs(cls, value: Any) -> list[Any]:
        inputs: list[Any] = [value] if isinstance(value, str) or _is_ids(value) else value
        if not isinstance(inputs, list) or not inputs:
            raise wrong("it must be a string, an array of strings, or one or more arrays of token ids")
        if len(inputs) > MOST_INPUTS:
            raise wrong(f"at most {MOST_INPUTS} inputs, not {len(inputs)}")
        text = isinstance(inputs[0], str)
        for index, one in enumerate(inputs):
            if not (isinstance(one, str) if text else _is_ids(one)):
                kind = "a string" if text else "an array of token ids"
                raise wrong(f"it must be {kind}", f"[{index}]")
            if not one:
                raise wrong("it is empty", f"[{index}]")
        return inputs

    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"encoding": self.encoding_format}
        if self.dimensions is not None:
            params["dimensions"] = self.dimensions
        return params


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(id) is int and id >= 0 for id in value)
