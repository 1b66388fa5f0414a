"""The body of a chat completion."""

from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, field_validator, model_validator

from jobs.bodies import tools as body_tools
from jobs.bodies.base import refuse
from jobs.bodies.generation import GenerationBody
from jobs.bodies.message import Message

RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens"),
    )
)
"""Arguments of transformers' apply_chat_template that are not the template's variables."""


class ChatBody(GenerationBody):
    """The body of a chat completion."""

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, gt=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    modalities: list[str] | None = None

    # "plain": pydantic must not copy what is shared by all lines.
    @field_validator("tools", mode="plain")
    @classmethod
    def _tools(cls, value: Any) -> list[dict[str, Any]]:
        return body_tools.tools(value)  # type: ignore[no-any-return]

    @field_validator("tool_choice", mode="plain")
    @classmethod
    def _tool_choice(cls, value: Any) -> str | dict[str, Any]:
        return body_tools.tool_choice(value)

    @field_validator("response_format", mode="plain")
    @classmethod
    def _response_format(cls, value: Any) -> dict[str, Any] | None:
        return body_tools.response_format(value)  # type: ignore[no-any-return]

    @field_validator("modalities", mode="plain")
    @classmethod
    def _text_only(cls, value: Any) -> list[str]:
        if value != ["text"]:
            refuse("modalities", value, 'only ["text"] is supported')
        return ["text"]

    @field_validator("chat_template_kwargs")
    @classmethod
    def _for_the_template(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := RESERVED & value.keys():
            refuse("chat_template_kwargs", value, f"{', '.join(sorted(taken))} cannot be set by a request")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self._check_lengths()
        self._check_choice()
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", self.top_logprobs, "it needs logprobs: true")
        if self.continue_final_message:
            self._check_continued()
        if self.constrained:
            for name in ("min_tokens", "ignore_eos", "continue_final_message"):
                if value := getattr(self, name):
                    refuse(name, value, "not together with a response_format of JSON or tools to call")
        return self

    def _check_lengths(self) -> None:
        asked = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(asked) > 1:
            refuse("max_completion_tokens", self.max_completion_tokens, f"max_tokens is {self.max_tokens}")

    def _check_choice(self) -> None:
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return
        if not self.tools:
            refuse("tool_choice", choice, "it needs tools")
        if isinstance(choice, dict) and choice["function"]["name"] not in self._tool_names():
            refuse("tool_choice", choice, "no tool has this name")

    def _check_continued(self) -> None:
        last = self.messages[-1]
        if self.add_generation_prompt:
            refuse("add_generation_prompt", True, "not together with continue_final_message")
        # Of a message of blanks alone, templates that trim leave nothing to go on with.
        if last.role != "assistant" or not (last.content or "").strip() or last.tool_calls:
            refuse("continue_final_message", True, "the last message must be an assistant's, of text alone")

    def _tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call in this answer."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def constrained(self) -> bool:
        """Whether the answer must have a form."""
        return self.response_format is not None or bool(self.offered)

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens or self.max_completion_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.top_logprobs if self.logprobs else None
