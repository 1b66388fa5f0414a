"""The messages of a chat."""

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from jobs.bodies.base import wrong

TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NOT_TEXT = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}
OF_ANSWERS = {"annotations", "audio", "function_call", "refusal"}
"""Fields of an answer that clients send back: empty they mean nothing, else they are refused."""


class Message(BaseModel):
    """One chat message. Further fields are variables of the chat template's."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong("it must be a string or an array of text parts")
        return "".join(_text_of(part, f"[{index}]") for index, part in enumerate(value))

    @field_validator("tool_calls", mode="before")
    @classmethod
    def _calls(cls, value: Any) -> Any:
        if value is None or value == []:
            return None
        if not isinstance(value, list):
            raise wrong("it must be an array of calls")
        return [_call(call, f"[{index}]") for index, call in enumerate(value)]

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise wrong("content may be null only beside tool_calls", ".content")
        if self.tool_calls and self.role != "assistant":
            raise wrong(f"a {self.role} message makes no calls", ".tool_calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise wrong(f"a {self.role} message answers no call", ".tool_call_id")
        for name in self.further.keys() & OF_ANSWERS:
            if self.further[name]:
                raise wrong(f"{name} of a message is not supported", f".{name}")
        return self

    @property
    def further(self) -> dict[str, Any]:
        """Fields that the contract does not have."""
        extra = self.model_extra
        return {name: value for name, value in extra.items() if value is not None} if extra else {}

    def plain(self) -> dict[str, Any]:
        """Return the message as templates take it: content as one string, developer as system."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",  # templates add it to strings
        }
        for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message | self.further


def _text_of(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise wrong('a part must be of the form {"type": "text", "text": "..."}', at)
    kind = part.get("type")
    if isinstance(kind, str) and kind in NOT_TEXT:
        raise wrong(f"parts of the type {kind} ({NOT_TEXT[kind]}) are not supported, only text", at)
    present = {name for name, value in part.items() if value is not None}
    if kind != "text" or present != {"type", "text"} or not isinstance(part["text"], str):
        raise wrong('only parts of the form {"type": "text", "text": "..."} are supported', at)
    return part["text"]


def _call(call: Any, at: str) -> dict[str, Any]:
    """Return a call of an assistant in its one form: id if any, type, name and arguments."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        raise wrong('a call must be of the form {"type": "function", "function": {...}}', at)
    if call.get("type") not in ("function", None):
        raise wrong("only calls of the type function are supported", f"{at}.type")
    if not isinstance(call.get("id"), str | None):
        raise wrong("it must be a string", f"{at}.id")
    if not isinstance(name := function.get("name"), str) or not TOOL_NAME.fullmatch(name):
        raise wrong(f"it must match {TOOL_NAME.pattern}", f"{at}.function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict):
        raise wrong("it must be a string that holds a JSON object", f"{at}.function.arguments")
    plain = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return plain if call.get("id") is None else {"id": call["id"], **plain}
