"""What decides an output: the prompt, the model and the parameters; and the key that follows from them."""

import difflib
import hashlib
import os
from pathlib import Path
from typing import Any, Final, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jobs import errors

KEY_BYTES = 16
CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
_RETRY_TEMPERATURE = 0.7


class RecipeChanged(errors.Conflict):
    """{directory} is of another recipe. --overwrite takes this one; another -o keeps both.{difference}"""


class RecipeUnreadable(errors.Conflict):
    """{path} cannot be read: {reason}. --overwrite takes this run's recipe; outputs that fit it are kept."""


class Message(BaseModel):
    """One message of a chat; its content is a template."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class Parameters(BaseModel):
    """What of a request's parameters a recipe can set (docs/parameters.md); None is the model's default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int | None = Field(None, gt=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    stop: tuple[str, ...] = Field((), max_length=4)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def said(self) -> dict[str, Any]:
        """Return those that are set."""
        return {name: value for name, value in self if value not in (None, ())}


class Recipe(BaseModel):
    """How outputs are made of rows. Two runs with equal recipes give a row the same output.

    `fingerprint` names the exact model: source, revision, dtype, quantisation. `continues` is the column with
    the messages of an earlier step, which come before this one's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    fingerprint: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"] = CHAT
    messages: tuple[Message, ...] = Field(min_length=1)
    continues: str | None = None
    parameters: Parameters = Parameters()
    output_schema: dict[str, Any] | None = None
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.endpoint == COMPLETION and (len(self.messages) > 1 or self.continues):
            raise ValueError("a completion takes one prompt; several messages are a chat")
        if self.endpoint == COMPLETION and self.output_schema:
            raise ValueError("a schema needs a chat: completions have no response_format")
        return self

    def body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        """Return the body of a request for rendered messages, without its seed."""
        said: dict[str, Any] = {"model": self.model}
        if self.endpoint == CHAT:
            said["messages"] = messages
        else:
            said["prompt"] = messages[0]["content"]
        said |= self.parameters.said()
        if self.output_schema is not None:
            schema = {"name": "output", "schema": self.output_schema, "strict": True}
            said["response_format"] = {"type": "json_schema", "json_schema": schema}
        return said

    def key(self, messages: list[dict[str, str]], sample: int, again: int) -> bytes:
        """Return what an output is kept under: 16 bytes of the prompt, the model and the parameters.

        `again` counts equal prompts before this one, so that drawn outputs of equal rows differ. The order of
        a schema counts, too: a model writes properties in that order.
        """
        said = [self.fingerprint, self.seed, sample, again, self.body(messages)]
        return hashlib.sha256(orjson.dumps(said)).digest()[:KEY_BYTES]

    def request(self, messages: list[dict[str, str]], key: bytes, attempt: int) -> bytes:
        """Return the line of a request."""
        return self._line(self.body(messages), key, attempt)

    def again(self, line: dict[str, Any], attempt: int) -> bytes:
        """Return the line of a further attempt at a request whose line is known."""
        return self._line(line["body"], key_of(line["custom_id"])[0], attempt)

    def _line(self, body: dict[str, Any], key: bytes, attempt: int) -> bytes:
        """A further attempt has another seed, and draws even where the first did not."""
        if attempt and self.parameters.greedy:
            body = body | {"temperature": _RETRY_TEMPERATURE}
        if attempt or not self.parameters.greedy:
            seed = int.from_bytes(hashlib.sha256(key + bytes([attempt])).digest()[:8]) >> 1
            body = body | {"seed": seed}
        line = {"custom_id": custom_id(key, attempt), "method": "POST", "url": self.endpoint, "body": body}
        return orjson.dumps(line) + b"\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recipe that `write` has written; raises RecipeUnreadable."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise RecipeUnreadable(path=path, reason=error.errors(include_url=False)[0]["msg"]) from None

    def write(self, path: Path) -> None:
        """Write the recipe to a file, at once or not at all."""
        unfinished = path.with_suffix(".part")
        with unfinished.open("w") as stream:
            stream.write(self.model_dump_json(indent=2))
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)

    def check_same(self, known: Self, directory: object) -> None:
        """Raise RecipeChanged, which shows the difference, if `known` gives other outputs."""
        if self.model_dump_json() == known.model_dump_json():
            return
        lines = difflib.unified_diff(known.shown(), self.shown(), "before", "now", n=0, lineterm="")
        raise RecipeChanged(directory=directory, difference="".join(f"\n{line}" for line in lines))

    def shown(self) -> list[str]:
        """Return the recipe as lines for people."""
        lines = [f"model: {self.model}", f"fingerprint: {self.fingerprint}", f"endpoint: {self.endpoint}"]
        lines += [
            f"seed: {self.seed}",
            *(f"{name}: {value}" for name, value in self.parameters.said().items()),
        ]
        if self.continues:
            lines.append(f"continues: {self.continues}")
        for message in self.messages:
            lines += [f"{message.role}: {line}" for line in message.content.split("\n")]
        if self.output_schema is not None:
            schema = orjson.dumps(self.output_schema, option=orjson.OPT_INDENT_2)
            lines += [f"schema: {line}" for line in schema.decode().split("\n")]
        return lines


def custom_id(key: bytes, attempt: int) -> str:
    """Return the name of a request."""
    return f"{key.hex()}-{attempt}"


def key_of(name: str) -> tuple[bytes, int]:
    """Return key and attempt of a request's name."""
    key, _, attempt = name.partition("-")
    return bytes.fromhex(key), int(attempt)
