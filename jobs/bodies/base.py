"""What the bodies of all endpoints share, and how their validators refuse."""

from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from jobs import errors, values


def wrong(reason: str, at: str = "") -> PydanticCustomError:
    """Return what a validator raises; `at` is a place inside its value, such as `[1].type`."""
    return PydanticCustomError("value_error", "{reason}", {"reason": reason, "at": at})


def refuse(param: str, value: Any, reason: str) -> NoReturn:
    """Refuse a parameter's value where the parameter's whole name is known."""
    raise errors.ParameterRefused(f"{param}={values.short(value)}: {reason}.", param=param)


def _or_all(value: int) -> int:
    if value != -1 and value < 1:
        raise wrong("it must be at least 1, or -1 for as many as the model's context takes")
    return value


def _off(value: bool) -> bool:
    if value:
        raise wrong("only false is supported")
    return value


Off = Annotated[bool, AfterValidator(_off)]
"""A switch that Longhaul does not have. Not Literal[False], which 0 would pass."""


class Body(BaseModel):
    """What all endpoints take. Lengths in tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    truncate_prompt_tokens: Annotated[int, AfterValidator(_or_all)] | None = None
    stream: Off = False
    user: str | None = None

    def params(self) -> dict[str, Any]:
        """Return the parameters that change the answer, in one form for one meaning."""
        raise NotImplementedError
