"""What is fuzzed: each target makes an input, and gives it to what must take or refuse it."""

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from jobs import bodies, checks, creation, errors, grammars, lines, prepare, tokens
from jobs.model_settings import ModelSettings
from tests.fuzz import seeds
from tests.fuzz.mutate import Mutator
from tests.unit import planning

MOST_LINE_BYTES = 4000
_TEMPLATE = planning.TEMPLATES / "qwen3.jinja"


@dataclass(frozen=True)
class Target:
    """`make` gives the next input; `take` tells whether it was taken, and fails if it is not as promised."""

    name: str
    share: float
    make: Callable[[Mutator], Any]
    take: Callable[[Any], bool]


def strict(value: Any) -> None:
    """Fail unless a value is JSON that comes back the same from a strict writer."""
    assert orjson.loads(orjson.dumps(value)) is not None or value is None


def file_bytes(mutator: Mutator) -> bytes:
    """Return a file of a few lines."""
    some = [orjson.dumps(line_value(mutator)) for _ in range(mutator.random.randint(0, 3))]
    return mutator.bytes(mutator.random.choice((b"\n", b"\r\n")).join(some))


def line_value(mutator: Mutator) -> dict[str, Any]:
    endpoint = mutator.random.choice(list(seeds.BODIES))
    return seeds.line(endpoint, mutator.random.choice(seeds.BODIES[endpoint]))


def read_lines(data: bytes) -> bool:
    parsed, last = False, 0
    for line in lines.read(io.BytesIO(data), MOST_LINE_BYTES):
        assert line.number > last
        last = line.number
        if line.data is None:
            continue
        assert 0 < len(line.data) <= MOST_LINE_BYTES
        assert b"\n" not in line.data
        try:
            value, fault = lines.parse(line.data)
        except ValueError:
            continue
        parsed = True
        if fault is None:
            strict(value)
    return parsed


def check_line(data: bytes) -> bool:
    try:
        found = checks.check(lines.Line(1, data), planning.record(), MOST_LINE_BYTES)
    except checks.LineRefused as refused:
        strict(refused.error.model_dump())
        return False
    assert 0 < len(found.custom_id) <= checks.MAX_CUSTOM_ID
    found.custom_id.encode()
    if found.refusal is None:
        strict(found.body)
    return found.refusal is None


def one_line(mutator: Mutator) -> bytes:
    value = line_value(mutator)
    if mutator.random.random() < 0.5:
        return mutator.bytes(orjson.dumps(value))
    return _dumped(mutator.value(value))


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # deeper than orjson writes, though it reads it
        return b"[" * 300 + b"]" * 300


def body_of(endpoint: str) -> Target:
    def make(mutator: Mutator) -> Any:
        return mutator.value({"model": "m", **mutator.random.choice(seeds.BODIES[endpoint])})

    def take(body: Any) -> bool:
        if not isinstance(body, dict) or lines.fault({"body": body}):
            return False
        try:
            strict(bodies.read(endpoint, body).params())
        except errors.ParameterRefused as refused:
            strict(refused.body())
            return False
        return True

    return Target(f"body {endpoint}", 0.12, make, take)


def create(body: Any) -> bool:
    try:
        made = creation.parse(body)
    except errors.InvalidRequest as refused:
        strict(refused.body())
        return False
    strict(made.model_dump(exclude={"requests"}))
    return True


def rendered_by(tokenizer: tokens.Tokenizer) -> Callable[[Any], bool]:
    def take(body: Any) -> bool:
        if not isinstance(body, dict) or lines.fault({"body": body}):
            return False
        try:
            checked = bodies.read("/v1/chat/completions", body)
            (text,) = tokenizer.template.render_all([prepare.chat(checked, tokenizer)])  # type: ignore[list-item]
            if isinstance(text, errors.ParameterRefused):
                raise text
            ready = prepare.prepare(0, "a", checked, text, tokenizer)
        except errors.ParameterRefused as refused:
            strict(refused.body())
            return False
        strict(ready.params)
        return True

    return take


def chat(mutator: Mutator) -> Any:
    """Return a chat without a schema, which has a target of its own."""
    seed = {"model": "m", **mutator.random.choice(seeds.CHATS)}
    for name in ("tools", "tool_choice", "parallel_tool_calls", "response_format"):
        seed.pop(name, None)
    return mutator.value(seed)


def build_grammar(schema: Any) -> bool:
    if lines.fault({"body": schema}):
        return False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        body = bodies.read(
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": form},
        )
        grammar = grammars.build(body.response_format, [], "none", None, None, True)  # type: ignore[attr-defined]
    except errors.ParameterRefused as refused:
        strict(refused.body())
        return False
    strict(grammar)
    return True


@contextmanager
def opened() -> Iterator[list[Target]]:
    """Give the targets; rendering has a tokenizer with the chat template of a real model."""
    with tempfile.TemporaryDirectory() as directory:
        source = planning.save_tokenizer(Path(directory))
        settings = ModelSettings(source=str(source), chat_template=str(_TEMPLATE), context_tokens=2048)
        tokenizer = tokens.Tokenizer.load("m", settings)
        yield [
            Target("lines", 0.25, file_bytes, read_lines),
            Target("checks", 0.22, one_line, check_line),
            *(body_of(endpoint) for endpoint in seeds.BODIES),
            Target("creation", 0.12, lambda m: m.value(m.random.choice(seeds.CREATIONS)), create),
            Target("rendering", 0.045, chat, rendered_by(tokenizer)),
            Target("grammars", 0.005, lambda m: m.value(seeds.SCHEMA), build_grammar),
        ]
