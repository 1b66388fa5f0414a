"""Request bodies: every parameter is honoured or refused by name, never ignored. null means absent."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from jobs import errors, values

LEAST_TEMPERATURE = 1e-6
"""Far below it, logits over temperature leave the range of floats; draws are the greedy ones by then."""
MOST_TOP_K = 2**31 - 1
"""More than any vocabulary has."""
LATER = "is not supported by this version of Longhaul"
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "stream": (False,),
}
"""Parameters this version knows but does not run: values that change nothing are fine, others are refused."""


RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
    )
)
"""Arguments of transformers' apply_chat_template that are not the template's variables."""


class Message(BaseModel):
    """One chat message; `extra` fields such as tool_calls reach the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError("content must be a string or an array of text parts")
        for part in value:
            if (
                not isinstance(part, dict)
                or part.get("type") != "text"
                or not isinstance(part.get("text"), str)
            ):
                raise ValueError('only parts of the form {"type": "text", "text": "..."} are supported')
        return "".join(part["text"] for part in value)

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not (self.model_extra or {}).get("tool_calls"):
            raise ValueError("content may be null only beside tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message as templates take it: content as one string, developer as system."""
        role = "system" if self.role == "developer" else self.role
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        return {"role": role, "content": self.content, **extra}


class Body(BaseModel):
    """What chat and text completions share. Lengths in tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: int | None = Field(None, gt=0)
    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] = []
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    user: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError("stop must be a string or an array of strings, none of them empty")
        if len(stops) > 4:
            raise ValueError(f"at most 4 stop strings, not {len(stops)}")
        return stops

    def params(self) -> dict[str, Any]:
        """Return the parameters that change the output, in one form for one meaning."""
        params: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0.0}
        if self.temperature > 0:
            params |= {
                "temperature": max(self.temperature, LEAST_TEMPERATURE),
                "top_p": self.top_p,
                "top_k": min(max(self.top_k, 0), MOST_TOP_K),
                "min_p": self.min_p,
                "seed": self.seed,
            }
        return params | {"stop": self.stop, "min_tokens": self.min_tokens, "ignore_eos": self.ignore_eos}


class ChatBody(Body):
    """The body of a chat completion."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, gt=0)
    chat_template_kwargs: dict[str, Any] = {}

    @field_validator("chat_template_kwargs")
    @classmethod
    def _for_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := RESERVED & value.keys():
            raise ValueError(f"{', '.join(sorted(taken))} cannot be set by a request")
        return value

    def params(self) -> dict[str, Any]:
        asked = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(asked) > 1:
            message = f"max_tokens and max_completion_tokens differ: {sorted(asked, key=str)}."
            raise errors.ParameterRefused(message, param="max_completion_tokens")
        return super().params() | {"max_tokens": asked.pop() if asked else None}


class CompletionBody(Body):
    """The body of a text completion, with OpenAI's default of 16 tokens."""

    prompt: str | list[int]
    max_tokens: int | None = Field(16, gt=0)

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
            value = value[0]
        ids = isinstance(value, list) and value and all(type(id) is int and id >= 0 for id in value)
        if not ids and not (isinstance(value, str) and value):
            raise ValueError("prompt must be one text that is not empty, or an array of token ids")
        return value


BODIES: dict[str, type[Body]] = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}


def read(endpoint: str, body: dict[str, Any]) -> Body:
    """Validate a request body; raises ParameterRefused that names the parameter."""
    present = {name: value for name, value in body.items() if value is not None}
    for name, neutral in NEUTRAL.items():
        if name not in present:
            continue
        value = present.pop(name)
        if not any(_same(value, fine) for fine in neutral):
            raise errors.ParameterRefused(f"{name}={values.short(value)} {LATER}.", param=name)
    try:
        return BODIES[endpoint].model_validate(present)
    except ValidationError as error:
        raise _refused(error) from None


def _same(value: Any, fine: Any) -> bool:
    """Compare as JSON does: true is not 1."""
    return value == fine and isinstance(value, bool) == isinstance(fine, bool)


def _refused(error: ValidationError) -> errors.ParameterRefused:
    first = error.errors(include_url=False)[0]
    if first["type"] == "extra_forbidden":
        name = values.short(first["loc"][0]).strip('"')
        return _refusal(f"Unknown parameter: {name!r}.", name, "unknown_parameter")
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = path.removeprefix(".").split(".str")[0].split(".list[")[0]
    if first["type"] == "missing":
        return _refusal(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    reason = first["msg"].removeprefix("Value error, ")
    return errors.ParameterRefused(f"{param}={values.short(first['input'])}: {reason}.", param=param)


def _refusal(message: str, param: str, code: str) -> errors.ParameterRefused:
    error = errors.ParameterRefused(message, param=param)
    error.code = code
    return error
