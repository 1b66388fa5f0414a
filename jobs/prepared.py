"""A request on its way into the plan: its prompt as text, parameters, and then token ids that fit."""

from dataclasses import dataclass, replace
from typing import Any

from jobs import errors


@dataclass(frozen=True)
class Prepared:
    """A request whose body is valid. Its prompt is text, `rendered` by the chat template or not, or ids.

    `truncate`: the last so many tokens of the prompt are kept; -1: as many as fit.
    """

    row: int
    custom_id: str
    prompt: str | list[int]
    rendered: bool
    params: dict[str, Any]
    truncate: int | None = None

    def fitted(
        self, prompt_ids: list[int], context: int, default: int | None
    ) -> tuple["Prepared", list[int]]:
        """Return the request with max_tokens settled, and its prompt, truncated if it wants that.

        Raises ContextLengthExceeded, ParameterRefused.
        """
        asked = self.params["max_tokens"]
        if not prompt_ids:
            raise errors.ParameterRefused("The prompt has no tokens.", param=self._param)
        if self.truncate == -1 and not (asked or default):
            message = "truncate_prompt_tokens=-1 needs max_tokens, for which it makes room."
            raise errors.ParameterRefused(message, param="truncate_prompt_tokens")
        if self.truncate is not None:
            fits = context - (asked or default or 1)
            prompt_ids = prompt_ids[-max(1, fits if self.truncate == -1 else self.truncate) :]
        room = context - len(prompt_ids)
        if room < (asked or 1):
            raise errors.ContextLengthExceeded(
                param=self._param, context=context, prompt=len(prompt_ids), asked=asked or 1
            )
        settled = asked or min(default or room, room)
        if self.params["min_tokens"] > settled:
            message = f"min_tokens={self.params['min_tokens']} is more than max_tokens={settled}."
            raise errors.ParameterRefused(message, param="min_tokens")
        return replace(self, params=self.params | {"max_tokens": settled}), prompt_ids

    @property
    def _param(self) -> str:
        return "messages" if self.rendered else "prompt"


@dataclass(frozen=True)
class PreparedInputs:
    """An embedding request whose body is valid. Its inputs are texts or token ids, the first `most` kept."""

    row: int
    custom_id: str
    inputs: list[Any]
    params: dict[str, Any]
    most: int | None = None

    def fitted(
        self, inputs: list[list[int]], context: int, default: int | None
    ) -> tuple["PreparedInputs", list[int]]:
        """Return the request with its further inputs among the parameters, and the first one.

        Raises ContextLengthExceeded, ParameterRefused.
        """
        for index, ids in enumerate(inputs):
            param = f"input[{index}]"
            if not ids:
                raise errors.ParameterRefused(f"{param} has no tokens.", param=param)
            if len(ids) > context:
                raise errors.InputTooLong(param=param, what=param, context=context, tokens=len(ids))
        first, *further = inputs
        return replace(self, params=self.params | {"inputs": further} if further else self.params), first
