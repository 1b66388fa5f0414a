"""The process that renders chat templates: JSON lines in and out, with little memory, time and rights.

A batch is a line `[number of calls, templates]`, and for each call a line `[function, index of its template,
arguments...]`, which a line `[value, error]` answers.

A template is a program of the model's author, run on what users send. Jinja's sandbox keeps it from Python's
internals, but not from `'x' * 10**10` or loops in loops; the kernel does, and ends this process and no other.
Run by its path, so that it imports nothing of Longhaul.
"""

import datetime
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from typing import Any

MOST_BYTES = 1 << 30
MOST_CHARACTERS = 50_000_000
BUFFER_BYTES = 1 << 20
NO_MEMORY = 3
"""The status of a process that ended since it had no memory."""
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")


def main(cpu_seconds: float) -> None:
    """Answer requests until the input ends, each within so many seconds of computing."""
    import jinja2.sandbox  # noqa: F401
    import orjson

    for limit, most in (
        (resource.RLIMIT_AS, MOST_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 16),
    ):
        resource.setrlimit(limit, (most, most))
    with open(0, "rb", BUFFER_BYTES) as source, open(1, "wb", BUFFER_BYTES) as target:
        while header := source.readline():
            calls, templates = orjson.loads(header)
            # All are read before one is answered: who asks does not listen until then.
            for line in list(islice(source, calls)):
                # Its signal is not handled: when the time is over, the kernel ends the process in any case.
                signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
                answer = _answered(templates, *orjson.loads(line))
                signal.setitimer(signal.ITIMER_PROF, 0)
                target.write(answer + b"\n")
            target.flush()


def _answered(templates: list[str], function: str, template: int, *arguments: Any) -> bytes:
    import orjson

    try:
        return orjson.dumps([_FUNCTIONS[function](templates[template], *arguments), None])
    except MemoryError:  # another call may have taken it: the next process has all
        os._exit(NO_MEMORY)
    except Exception as error:  # the template's own
        reason = (str(error).strip() or type(error).__name__)[:1000]
        return orjson.dumps([None, reason.encode(errors="replace").decode()])


def variables(template: str) -> list[str]:
    """Return the names that a template takes from outside; here, since Jinja computes constants for that."""
    from jinja2 import meta

    environment = _environment()
    return sorted(meta.find_undeclared_variables(environment.parse(template)))


def render(template: str, messages: list[Any], continue_final: bool, variables: dict[str, Any]) -> str:
    """Render as `apply_chat_template` of transformers does."""
    chat = [_aliased({name: value for name, value in one.items() if value is not None}) for one in messages]
    final = ""
    if continue_final:
        final = chat[-1]["content"]
        chat[-1] = chat[-1] | {"content": final + _TAG}
    text: str = _compiled(template).render(messages=chat, **variables)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it made {len(text)} characters, more than {MOST_CHARACTERS}")
    return _cut(text, final) if continue_final else text


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the names by which templates know it."""
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _cut(text: str, final: str) -> str:
    """Cut a prompt behind its last message, which it must contain."""
    if final.strip() not in text or _TAG.strip() not in text:
        raise ValueError("the final message, which is to be continued, is not in what it made")
    end = text.rindex(_TAG.strip())
    return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()


@lru_cache(32)
def _compiled(template: str) -> Any:
    return _environment().from_string(template)


@lru_cache(1)
def _environment() -> Any:
    from jinja2 import TemplateError, ext, nodes, parser, sandbox, utils
    from jinja2.exceptions import SecurityError

    class Generation(ext.Extension):
        """The tag of transformers that marks what an assistant said."""

        tags = {"generation"}

        def parse(self, parser: parser.Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Callable[[], str]) -> str:
            return caller()

    class Namespace(utils.Namespace):
        """Holds no name that Python keeps for itself."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace cannot have {name!r}")
            super().__setitem__(name, value)

    def refuse(message: object = "") -> None:
        raise TemplateError(str(message))

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": Namespace,
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


_FUNCTIONS: dict[str, Callable[..., Any]] = {"render": render, "variables": variables}

if __name__ == "__main__":
    main(float(sys.argv[1]))
