"""The steps of a pipeline, as a YAML file or the options of the command say them."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from jobs import errors
from jobs.dataset import recipe

JUDGE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"score": {"type": "integer", "minimum": 1, "maximum": 10}},
    "required": ["score"],
    "additionalProperties": False,
}
"""What a judge answers unless it is told otherwise."""


NEAR = 0.8
"""How much of their shingles near-duplicates have in common, unless it is said."""


_MESSAGES = TypeAdapter(tuple[recipe.Message, ...])


class PipelineWrong(errors.InvalidRequest):
    """{place}: {reason}."""


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompted(Step):
    """What has a prompt: `prompt` is the user's message; or `messages`, which are all of them."""

    prompt: str | None = None
    system: str | None = None
    messages: tuple[recipe.Message, ...] = ()
    parameters: recipe.Parameters = recipe.Parameters()
    retries: int = Field(0, ge=0, le=100)
    seed: int = Field(0, ge=0, lt=2**63)

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: Any) -> Any:
        """Take the request's parameters beside the other fields."""
        if not isinstance(given, dict):
            return {"prompt": given}
        own = {name: value for name, value in given.items() if name in recipe.Parameters.model_fields}
        rest = {name: value for name, value in given.items() if name not in own}
        nested = rest.get("parameters") or {}
        if isinstance(nested, dict):
            rest["parameters"] = cls.model_fields["parameters"].default.said() | nested | own
        return rest

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.messages) == bool(self.prompt or self.system):
            raise ValueError("give a prompt (with a system message, if you like), or messages")
        return self

    @property
    def all_messages(self) -> tuple[recipe.Message, ...]:
        """The messages in their order."""
        if self.messages:
            return self.messages
        said = (("system", self.system), ("user", self.prompt))
        return tuple(recipe.Message(role=role, content=text) for role, text in said if text is not None)


class Generate(Prompted):
    """Have a model write an output for each row, `samples` of them. `continues` names an earlier step whose
    conversation goes on.
    """

    kind: Literal["generate"] = "generate"
    name: str = Field("generate", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,40}$")
    raw: bool = False
    output_schema: Any = Field(None, alias="schema")
    samples: int = Field(1, ge=1, le=1000)
    keep_invalid: bool = False
    output: str = Field("output", min_length=1)
    continues: str | None = Field(None, alias="continue")

    @model_validator(mode="after")
    def _raw_is_one_text(self) -> Self:
        also = {"system": self.system, "several messages": len(self.all_messages) > 1}
        also |= {"schema": self.output_schema, "continue": self.continues}
        for name, said in also.items():
            if self.raw and said:
                raise ValueError(f"raw completes one text: it goes with no {name}")
        if self.output_schema is None and (self.retries or self.keep_invalid):
            raise ValueError("retries and keep_invalid need a schema")
        return self


class Judge(Prompted):
    """Have the model give each output a number; keep the best of a row's samples, or what has `least`."""

    kind: Literal["judge"] = "judge"
    name: str = Field("judge", pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,40}$")
    output_schema: Any = Field(JUDGE_SCHEMA, alias="schema")
    # A judgement is short: memory for a whole context would push out what other steps can use again.
    parameters: recipe.Parameters = recipe.Parameters(max_tokens=256, temperature=0)
    score: str = "score"
    best: bool = False
    least: float | None = None

    @property
    def chooses(self) -> bool:
        """Whether it leaves rows out."""
        return self.best or self.least is not None


class Filter(Step):
    """Keep the rows for which an SQL expression is true, or whose text has a form."""

    kind: Literal["filter"] = "filter"
    where: str | None = None
    column: str = "output"
    min_chars: int | None = Field(None, ge=0)
    max_chars: int | None = Field(None, ge=0)
    match: str | None = None
    reject: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _expression(cls, given: Any) -> Any:
        return {"where": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _something(self) -> Self:
        if self.where is None and not self.of_text:
            raise ValueError("say what to filter by: where, min_chars, max_chars, match or reject")
        return self

    @property
    def of_text(self) -> dict[str, Any]:
        """What is asked of the text, as `quality.Filters` takes it."""
        asked = {name: getattr(self, name) for name in ("min_chars", "max_chars", "match", "reject")}
        return {name: value for name, value in asked.items() if value is not None}


class Expand(Step):
    """Make a row of each item of a list, in the column `to`."""

    kind: Literal["expand"] = "expand"
    column: str
    to: str | None = Field(None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _column(cls, given: Any) -> Any:
        return {"column": given} if isinstance(given, str) else given


class Dedupe(Step):
    """Keep the first of equal texts; with `near`, of those with this part of their shingles in common."""

    kind: Literal["dedupe"] = "dedupe"
    column: str = "output"
    near: float | None = Field(None, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _way(cls, given: Any) -> Any:
        ways: dict[str | None, dict[str, float]] = {"exact": {}, "near": {"near": NEAR}, None: {}}
        if not isinstance(given, str | None):
            return given
        if given not in ways:
            raise ValueError(f"{given!r} is neither exact nor near, nor near: with a share such as {NEAR}")
        return ways[given]


AnyStep = Generate | Judge | Filter | Expand | Dedupe
_KINDS: dict[str, type[AnyStep]] = {
    kind.model_fields["kind"].default: kind for kind in (Generate, Judge, Filter, Expand, Dedupe)
}


def _said(given: Any) -> Any:
    """Take `{kind: what}`, as the file writes a step."""
    if isinstance(given, str):
        given = {given: None}
    if isinstance(given, Step):
        return given
    if not isinstance(given, dict) or len(given) != 1 or next(iter(given)) not in _KINDS:
        raise ValueError(f"a step is one of {', '.join(_KINDS)}, followed by what it does")
    ((kind, what),) = given.items()
    return _KINDS[kind].model_validate(what)


class Pipeline(Step):
    """Steps that follow each other; each takes the rows that the one before it gave."""

    steps: tuple[Annotated[AnyStep, BeforeValidator(_said)], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> Self:
        seen: set[str] = set()
        for step in self.steps:
            if not isinstance(step, Generate | Judge):
                continue
            if step.name in seen:
                raise ValueError(f"two steps are called {step.name}: give one another name")
            if isinstance(step, Generate) and step.continues is not None and step.continues not in seen:
                raise ValueError(f"{step.name} continues {step.continues}, which is no step before it")
            seen.add(step.name)
        return self


def pipeline(steps: Sequence[AnyStep | dict[str, Any]], place: str) -> Pipeline:
    """Return steps as a pipeline; raises PipelineWrong."""
    return _checked({"steps": list(steps)}, place)


def read(path: Path) -> Pipeline:
    """Read a pipeline from a YAML file; raises PipelineWrong that says where it is wrong."""
    return _checked(_beside(read_yaml(path), path.parent), str(path))


def _beside(given: Any, directory: Path) -> Any:
    """Take the paths of schemas as they are meant: from the file on."""
    if isinstance(given, list):
        return [_beside(item, directory) for item in given]
    if not isinstance(given, dict):
        return given
    made = {key: _beside(value, directory) for key, value in given.items()}
    named = made.get("schema")
    if isinstance(named, str) and (directory / named).is_file():
        made["schema"] = str(directory / named)
    return made


def read_messages(path: Path) -> tuple[recipe.Message, ...]:
    """Read the messages of a chat from a YAML file: a list of role and content; raises PipelineWrong."""
    found = read_yaml(path)
    listed = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(listed, list) or not listed:
        raise PipelineWrong(place=path, reason="it must be a list of messages, each with role and content")
    try:
        return _MESSAGES.validate_python(listed)
    except ValidationError as error:
        raise PipelineWrong(place=path, reason=_first(error)) from None


def read_yaml(path: Path) -> Any:
    """Read a YAML file; raises PipelineWrong."""
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise PipelineWrong(place=path, reason=error.strerror) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PipelineWrong(place=path, reason=f"it is not YAML: {' '.join(str(error).split())}") from None


def _checked(given: Any, place: str) -> Pipeline:
    try:
        if not isinstance(given, dict) or "steps" not in given:
            raise PipelineWrong(place=place, reason="it must say steps: and below it a list of them")
        return Pipeline.model_validate(given)
    except ValidationError as error:
        raise PipelineWrong(place=place, reason=_first(error)) from None


def _first(error: ValidationError) -> str:
    """Return the first thing that is wrong, with its place; steps count from 1, as people do."""
    first = error.errors(include_url=False)[0]
    path = [str(part + 1) if isinstance(part, int) else str(part) for part in first["loc"]]
    said = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden" and path:
        said = f"there is no such field{_near(path[-1])}"
    return f"{'.'.join(path)}: {said}" if path else said


def _near(name: str) -> str:
    """Return a question with the field that a wrong name looks like, if there is one."""
    fields = {field.alias or own for kind in _KINDS.values() for own, field in kind.model_fields.items()}
    known = fields | recipe.Parameters.model_fields.keys() | {"steps"}
    close = difflib.get_close_matches(name, known - {name}, 1)
    return f" (did you mean {close[0]}?)" if close else ""
