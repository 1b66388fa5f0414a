"""A model's chat template: rendering with it, and what can be seen of the formats it uses."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import orjson

from jobs import errors, rendering

ToolFormat = Literal["hermes", "llama"]
Reasoning = Literal["open", "closed"]
_OPEN, _CLOSE = "<think>", "</think>"
_MOST_CHARACTERS = 300
_LONGEST_NAME = 200
# Llama 3.x: its own mark, or the instruction and the rendering of calls as {"name": ..., "parameters": ...}.
_LLAMA = re.compile(r'<\|python_tag\|>|\{"name": .{0,80}"parameters": ', re.DOTALL)
# Others that say <tool_call> too: Qwen3-Coder and GLM put XML into it.
_NOT_HERMES = re.compile(r"<function=|<arg_key>")
_GIVEN = {"raise_exception", "strftime_now"}
"""What transformers gives to each template."""
_PROBE = "longhaul_probe"
_PROBE_ID = "123456789"
"""Mistral's templates take no other length."""


@dataclass(frozen=True)
class Chat:
    """A chat to render. `tools` are None or empty if there are none; `variables` are the request's own."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    continue_final: bool = False
    generation_prompt: bool = True


class ChatTemplate:
    """Renders chats of one model; `tool_format` and `reasoning` as in ModelSettings."""

    def __init__(self, tokenizer: Any, tool_format: str = "auto", reasoning: str = "auto") -> None:
        self._tokenizer = tokenizer
        self._tool_format, self._reasoning = tool_format, reasoning
        self._names = lru_cache(256)(self._named)

    @cached_property
    def text(self) -> str:
        """The template itself; of several, those for chats without and with tools. Empty: there is none."""
        source = self._tokenizer.chat_template
        if not isinstance(source, dict):
            return source or ""
        return "\n".join(source[name] for name in ("default", "tool_use") if name in source)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """The format in which the template wants calls; None: there are no tools, or in no format we know."""
        if self._tool_format != "auto":
            return None if self._tool_format == "none" else self._tool_format  # type: ignore[return-value]
        if not self.takes("tools"):
            return None
        if "<tool_call>" in self.text and not _NOT_HERMES.search(self.text):
            return "hermes"
        return "llama" if _LLAMA.search(self.text) else None

    @cached_property
    def thinks(self) -> bool:
        """Whether the model reasons between <think> and </think> before it answers."""
        return self._reasoning == "think" or (self._reasoning == "auto" and _CLOSE in self.text)

    def mentions(self, name: str) -> bool:
        """Tell whether the template names a field of a message."""
        return len(name) <= _LONGEST_NAME and self._names(name)

    def takes(self, name: str) -> bool:
        """Tell whether the template has a variable that a request can set, not one that it sets itself."""
        return name in self._variables if self._variables is not None else self.mentions(name)

    @cached_property
    def _variables(self) -> frozenset[str] | None:
        """The template's variables; None: it has something that Jinja does not know."""
        try:
            return rendering.shared.variables(self.text) - _GIVEN
        except rendering.RenderFailed:
            return None

    def _named(self, name: str) -> bool:
        return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self.text) is not None

    def reasoning(self, rendered: str, continued: str | None = None) -> Reasoning | None:
        """Tell how an answer to a rendered chat begins: inside its reasoning (open) or not (closed).

        `continued` is the message that it goes on with. None: the model does not think, or has done so in the
        prompt, as where thinking is switched off.
        """
        if not self.thinks or rendered.rstrip().endswith(_CLOSE):
            return None
        if continued and (_OPEN in continued or _CLOSE in continued):
            return "open" if continued.rfind(_OPEN) > continued.rfind(_CLOSE) else "closed"
        return "open" if rendered.rstrip().endswith(_OPEN) else "closed"

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the prompt of a chat (options as in Chat); raises ParameterRefused."""
        (found,) = self.render_all([Chat(messages, **options)])
        if isinstance(found, errors.ParameterRefused):
            raise found
        return found

    def render_all(self, chats: Sequence[Chat]) -> list[str | errors.ParameterRefused]:
        """Return the prompt of each chat, or that it is refused, with the template's words."""
        calls = [self._call(chat) for chat in chats]
        made = iter(rendering.shared.render_all([call for call in calls if isinstance(call, rendering.Call)]))
        found = [next(made) if isinstance(call, rendering.Call) else call for call in calls]
        # A template is a program of the model's author: whatever it raises is the line's.
        return [_refused(one) if isinstance(one, rendering.RenderFailed) else one for one in found]

    def _call(self, chat: Chat) -> rendering.Call | rendering.RenderFailed | errors.ParameterRefused:
        if not self.text:
            return errors.ParameterRefused(
                "This model has no chat template: use /v1/completions.", param="messages"
            )
        try:
            messages = [self._with_calls(message, index) for index, message in enumerate(chat.messages)]
            return self._given(replace(chat, messages=messages))
        except (errors.ParameterRefused, rendering.RenderFailed) as error:
            return error

    def _given(self, chat: Chat) -> rendering.Call:
        """Return what the template is given, as transformers gives it."""
        tools = chat.tools or None
        given = {
            "tools": tools,
            "documents": None,
            "add_generation_prompt": chat.generation_prompt and not chat.continue_final,
            **self._special,
            **(chat.variables or {}),
        }
        return rendering.Call(self._chosen(tools), chat.messages, chat.continue_final, given)

    @cached_property
    def _special(self) -> dict[str, Any]:
        """The special tokens; a tokenizer gathers them each time it is asked."""
        return dict(self._tokenizer.special_tokens_map)

    def _chosen(self, tools: Any) -> str:
        source = self._tokenizer.chat_template
        if not isinstance(source, dict):
            return str(source)
        chosen = source.get("tool_use") if tools is not None else None
        if chosen is None and "default" not in source:
            raise rendering.RenderFailed("the model has several templates, and none is the default")
        return str(chosen or source["default"])

    def _with_calls(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        """Give a message's calls their arguments as the template wants them: as objects or as JSON text."""
        if not message.get("tool_calls"):
            return message
        if self._calls_as is None:
            reason = "This model's chat template does not show tool calls of earlier messages."
            raise errors.ParameterRefused(reason, param=f"messages[{index}].tool_calls")
        return message | {
            "tool_calls": [_with_arguments(call, self._calls_as) for call in message["tool_calls"]]
        }

    @cached_property
    def _calls_as(self) -> type | None:
        """The type of arguments that calls are shown with, found out by trying; None: they are not shown."""
        shown: list[type | None] = []
        for kind, form in ((dict, f'"{_PROBE}": 1'), (str, f'{{"{_PROBE}":1}}')):
            try:
                call = self._given(Chat(_probe(kind)))
            except rendering.RenderFailed:  # none of its templates is for this
                return dict
            (text,) = rendering.shared.render_all([call])
            if isinstance(text, rendering.RenderFailed):  # it wants them otherwise, or refuses more than that
                continue
            if form in text:
                return kind
            shown.append(kind if _PROBE in text else None)
        return shown[0] if shown else dict


def read(path: str) -> str:
    """Return the template in a file; raises SettingsError with the place of what is wrong."""
    from jinja2 import Environment, TemplateSyntaxError, nodes, parser
    from jinja2.ext import Extension

    class Generation(Extension):
        """The tag of transformers that marks what an assistant said."""

        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
        Environment(extensions=["jinja2.ext.loopcontrols", Generation]).parse(text)
    except TemplateSyntaxError as error:
        raise errors.SettingsError(
            f"The chat template {path} is wrong in line {error.lineno}: {error}"
        ) from None
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise errors.SettingsError(f"The chat template {path} cannot be read: {reason}.") from None
    return text


def _refused(error: rendering.RenderFailed) -> errors.ParameterRefused:
    reason = str(error).split("\n")[0][:_MOST_CHARACTERS]
    return errors.ParameterRefused(f"The chat template refused the messages: {reason}", param="messages")


def _probe(kind: type) -> list[dict[str, Any]]:
    function = {"name": _PROBE, "arguments": f'{{"{_PROBE}":1}}'}
    call = _with_arguments({"id": _PROBE_ID, "type": "function", "function": function}, kind)
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": _PROBE_ID},
    ]


def _with_arguments(call: dict[str, Any], kind: type) -> dict[str, Any]:
    """Return a call whose arguments are of a kind; text that holds no JSON object stays as it is."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, kind):
        return call
    if kind is str:
        changed: Any = orjson.dumps(arguments).decode()
    else:
        try:
            changed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            changed = None
        if not isinstance(changed, dict):
            return call
    return call | {"function": call["function"] | {"arguments": changed}}
