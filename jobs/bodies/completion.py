"""The body of a text completion."""

from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from jobs.bodies.base import refuse, wrong
from jobs.bodies.generation import GenerationBody


class CompletionBody(GenerationBody):
    """The body of a text completion, with OpenAI's default of 16 tokens."""

    prompt: str | list[int]
    max_tokens: int | None = Field(16, gt=0)
    best_of: int | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            value = value[0]
        ids = isinstance(value, list) and value and all(type(id) is int and id >= 0 for id in value)
        if not ids and not (isinstance(value, str) and value):
            raise wrong("it must be one text that is not empty, or an array of token ids")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.best_of not in (None, self.n):
            refuse("best_of", self.best_of, f"it must be equal to n, which is {self.n}")
        return self

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def params(self) -> dict[str, Any]:
        params = super().params()
        if self.echo:
            params["answer"] = {"echo": True}
            if self.logprobs is not None:
                params["prompt_logprobs"] = True
        return params
