"""Templates that want more than to render: none gets out, none takes the planner's time or memory."""

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import rendering, rendering_process, template, tokens
from jobs.model_settings import ModelSettings

TEMPLATES = sorted((Path(__file__).parents[1] / "data" / "templates").glob("*.jinja"))
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Weather in Bern?\n "}]
CALLS = [
    {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"ä": [1, 2.5, None]}}}
]
CHATS = [
    ASK,
    [*ASK, {"role": "assistant", "content": "Rain, I  "}],
    [*ASK, {"role": "assistant", "content": "Rain", "reasoning_content": "Hm."}, ASK[1]],
    [*ASK, {"role": "assistant", "content": "Rain", "reasoning": "Hm.", "name": None}, ASK[1]],
    [*ASK, {"role": "assistant", "content": "", "tool_calls": CALLS}, {"role": "tool", "content": "x"}],
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[rendering.Renderer]:
    made = rendering.Renderer(cpu_seconds=0.3)
    yield made
    made.close()


def render(renderer: rendering.Renderer, text: str, **variables: Any) -> str:
    return renderer.render(text, ASK, False, variables)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_renders_as_transformers_renders_it(
    tokenizer_dir: Path, path: Path, chat: list[dict[str, Any]]
) -> None:
    settings = ModelSettings(source=str(tokenizer_dir), context_tokens=100, chat_template=str(path))
    loaded = tokens.Tokenizer.load("m", settings)
    theirs = loaded._tokenizer.apply_chat_template
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for ours, options in (
        ({}, {"add_generation_prompt": True}),
        ({"tools": tools}, {"add_generation_prompt": True, "tools": tools}),
        ({"generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final": True}, {"continue_final_message": True}),
    ):
        if chat[-1]["role"] != "assistant" and "continue_final" in ours:
            continue
        try:
            wanted = theirs(chat, tokenize=False, **options)
        except Exception:  # it wants the arguments of calls otherwise
            assert "tool_calls" in chat[2]
        else:
            assert loaded.template.render(chat, **ours) == wanted  # type: ignore[arg-type]


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch FILE') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].popen('touch FILE').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ messages|attr('__class__') }}",
    "{{ [messages]|map(attribute='__class__')|list }}",
    "{{ namespace.__init__.__globals__ }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ ('%s' % messages).__class__ }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ (messages|tojson).__class__ }}",
    "{{ messages.append(1) }}",
    "{{ ().__getattribute__('__class__') }}",
    "{{ (cycler|attr('__init__')) }}",
    "{{ config.items() }}{{ request.application }}{{ nothing.x.y }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% extends '/etc/passwd' %}",
    "{% from 'os' import system %}{{ system('touch FILE') }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_a_template_gets_at_nothing_of_python(
    renderer: rendering.Renderer, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "file"
    try:
        made = render(renderer, text.replace("FILE", str(file)))
    except rendering.RenderFailed:
        made = ""
    assert not file.exists()
    assert "root:" not in made
    assert "<class" not in made
    assert "module" not in made


HUGE = [
    "{{ 'x' * 10**10 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'|center(10**10) }}",
    "{{ [1] * 10**10 }}",
    "{{ [1]|batch(10**10, 0)|list }}",
    "{{ messages|tojson(indent=10**10) }}",
    "{{ lipsum(n=10**8) }}",
    "{{ range(10**10)|list }}",
    "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
]
ENDLESS = [
    "{{ 10 ** (10 ** 10) }}",
    "{{ 1.5|round(10**9, 'floor') }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
]


@pytest.mark.parametrize("text", HUGE)
def test_a_template_that_grows_ends_by_its_own_limits(renderer: rendering.Renderer, text: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(rendering.RenderFailed):
        render(renderer, text)
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert render(renderer, "{{ messages[0].content }}") == "Be brief."


@pytest.mark.parametrize("text", ENDLESS)
def test_a_template_without_end_is_ended(renderer: rendering.Renderer, text: str) -> None:
    with pytest.raises(rendering.RenderFailed, match=r"took more than 0\.3 s"):
        render(renderer, text)
    assert render(renderer, "{{ messages[0].content }}") == "Be brief."


def test_asking_for_the_variables_of_a_template_computes_nothing_here(
    renderer: rendering.Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "shared", renderer)
    for text in ("{{ 'x' * 10**10 }}", "{{ 10 ** (10 ** 9) }}"):
        found = template.ChatTemplate(_Plain(text))
        assert not found.takes("style")
        assert not found.thinks


class _Plain:
    """A tokenizer of which only the template is used."""

    special_tokens_map: dict[str, str] = {}

    def __init__(self, text: str) -> None:
        self.chat_template = text


def test_the_process_that_renders_sees_no_secrets_and_opens_no_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LONGHAUL_S3_SECRET_ACCESS_KEY", "secret")
    renderer = rendering.Renderer()
    assert render(renderer, "x") == "x"
    (process,) = renderer._idle
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    assert b"secret" not in environment
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert f"Max address space         {rendering_process.MOST_BYTES}" in limits
    renderer.close()
    assert not Path(f"/proc/{process.pid}").exists()


def test_a_process_that_was_killed_while_it_waited_is_replaced(renderer: rendering.Renderer) -> None:
    assert render(renderer, "x") == "x"
    for process in list(renderer._idle):
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert render(renderer, "x") == "x"


def test_many_threads_render_at_once(renderer: rendering.Renderer) -> None:
    made: list[str] = []

    def some(number: int) -> None:
        made.extend(render(renderer, "{{ n }}", n=number) for _ in range(50))

    threads = [threading.Thread(target=some, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == sorted(str(number) for number in range(4) for _ in range(50))
    assert len(renderer._idle) <= 4


HARMFUL = """
{%- if harm == "memory" %}{{ "x" * 10**10 }}{% endif %}
{%- if harm == "time" %}
{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{% endif %}
{%- if harm == "error" %}{{ raise_exception("no " ~ n) }}{% endif %}
{%- if harm == "work" %}{% for a in range(99) %}{% for b in range(9999) %}{% endfor %}{% endfor %}{% endif %}
{{- n }}"""


def _batch(renderer: rendering.Renderer, *harms: Any) -> list[str]:
    """Render one chat for each harm; give the texts and the errors."""
    calls = [
        rendering.Call(HARMFUL, ASK, False, {"harm": harm, "n": number}) for number, harm in enumerate(harms)
    ]
    return [str(found) for found in renderer.render_all(calls)]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("memory", "it took more than 1024 MiB of memory"),
        ("time", "it took more than 0.3 s of computing"),
        ("error", "no 100"),
    ],
)
def test_of_a_batch_only_the_guilty_line_is_refused(
    renderer: rendering.Renderer, harm: str, message: str
) -> None:
    harms = [None] * 256
    harms[100] = harm
    found = _batch(renderer, *harms)
    assert found[100] == message
    assert [text for number, text in enumerate(found) if number != 100] == [
        str(number) for number in range(256) if number != 100
    ]


def test_of_a_batch_each_guilty_line_is_refused_for_its_own_reason(renderer: rendering.Renderer) -> None:
    found = _batch(renderer, "error", "time", None, "memory", "error", "memory", None)
    assert [found[2], found[6]] == ["2", "6"]
    assert [found[0], found[4]] == ["no 0", "no 4"]
    assert "computing" in found[1]
    assert "memory" in found[3]
    assert "memory" in found[5]
    assert _batch(renderer, *["error"] * 300) == [f"no {number}" for number in range(300)]


def test_each_line_of_a_batch_has_its_own_time() -> None:
    renderer = rendering.Renderer(cpu_seconds=0.25)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert render(renderer, "x") == "x"
    (process,) = renderer._idle
    assert _batch(renderer, *["work"] * 30) == [str(number) for number in range(30)]
    assert renderer._idle == [process]  # it was not ended, and no other asked for the rest
    renderer.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime > 0.25


def test_what_nests_too_deeply_fails_alone_in_a_batch(renderer: rendering.Renderer) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    first, failed, last = _batch(renderer, None, deep, None)
    assert (first, last) == ("0", "2")
    assert "Recursion" in failed


def test_a_batch_larger_than_any_pipe_arrives(renderer: rendering.Renderer) -> None:
    texts = [f"{number}" * 100_000 for number in range(50)]
    calls = [rendering.Call("{{ n }}", [], False, {"n": text}) for text in texts]
    assert renderer.render_all(calls) == texts


def test_a_batch_has_several_templates(renderer: rendering.Renderer) -> None:
    calls = [rendering.Call(text, [], False, {"n": n}) for n, text in enumerate(["a{{ n }}", "b{{ n }}"] * 2)]
    assert renderer.render_all(calls) == ["a0", "b1", "a2", "b3"]
    assert renderer.render_all([]) == []


def test_values_arrive_as_they_are(renderer: rendering.Renderer) -> None:
    given = {"a": [1, 2.5, None, True, "\u2028\n\0"], "z": {"b": -(2**63)}}
    assert json.loads(render(renderer, "{{ given|tojson }}", given=given)) == given


def test_what_nests_too_deeply_is_refused(renderer: rendering.Renderer) -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    with pytest.raises(rendering.RenderFailed):
        render(renderer, "{{ deep|tojson }}", deep=deep)
