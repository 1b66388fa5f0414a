"""Pipelines as YAML: what they mean, and what is said of those that are wrong."""

from pathlib import Path
from typing import Any

import pytest

from jobs.dataset import recipe, steps


def read(path: Path, text: str) -> tuple[steps.AnyStep, ...]:
    place = path / "steps.yaml"
    place.write_text(text, "utf-8")
    return steps.read(place).steps


def test_a_pipeline_means_what_its_file_says(tmp_path: Path) -> None:
    made = read(
        tmp_path,
        """
steps:
- generate:
    name: ask
    prompt: "Fragen zu {{ text }} ü"
    system: Be short.
    max_tokens: 20
    stop: ["\\n"]
    schema: {type: object, properties: {questions: {type: array, items: {type: string}}}}
    retries: 2
- expand: {column: questions, to: question}
- generate: {name: answer, continue: ask, prompt: "{{ question }}", samples: 3, seed: 9}
- judge: {prompt: "{{ output }}", best: true, temperature: 1}
- filter: len(output) > 3
- filter: {column: output, min_chars: 2, reject: sorry}
- dedupe: near
- dedupe
- dedupe: {column: question, near: 0.5}
""",
    )
    ask, expand, answer, judge, where, texts, near, exact, share = made
    assert isinstance(ask, steps.Generate)
    assert [(m.role, m.content) for m in ask.all_messages] == [
        ("system", "Be short."),
        ("user", "Fragen zu {{ text }} ü"),
    ]
    assert ask.parameters == recipe.Parameters(max_tokens=20, stop=("\n",))
    assert (ask.retries, ask.samples) == (2, 1)
    assert expand == steps.Expand(column="questions", to="question")
    assert isinstance(answer, steps.Generate)
    assert (answer.continues, answer.samples, answer.seed) == ("ask", 3, 9)
    assert isinstance(judge, steps.Judge)
    assert judge.chooses
    assert judge.parameters == recipe.Parameters(max_tokens=256, temperature=1)
    assert judge.output_schema == steps.JUDGE_SCHEMA
    assert isinstance(where, steps.Filter)
    assert (where.where, where.of_text) == ("len(output) > 3", {})
    assert isinstance(texts, steps.Filter)
    assert texts.of_text == {"min_chars": 2, "reject": "sorry"}
    assert [step.near for step in (near, exact, share)] == [0.8, None, 0.5]


def test_a_prompt_alone_is_a_whole_step(tmp_path: Path) -> None:
    (step,) = read(tmp_path, "steps: [generate: '{{ text }}']")
    assert isinstance(step, steps.Generate)
    assert step.all_messages == (recipe.Message(role="user", content="{{ text }}"),)


@pytest.mark.parametrize("said", ["temperature: 1", "parameters: {temperature: 1}"])
def test_a_judge_keeps_its_usual_length_when_another_parameter_is_set(tmp_path: Path, said: str) -> None:
    (step,) = read(tmp_path, f"steps: [judge: {{prompt: x, {said}}}]")
    assert isinstance(step, steps.Judge)
    assert step.parameters == recipe.Parameters(max_tokens=256, temperature=1)


def test_a_judge_that_only_scores_leaves_nothing_out(tmp_path: Path) -> None:
    made = read(tmp_path, "steps: [judge: {name: a, prompt: x}, judge: {prompt: x, least: 0}]")
    assert [step.chooses for step in made if isinstance(step, steps.Judge)] == [False, True]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ".*steps: and below it a list"),
        ("5", ".*steps: and below it a list"),
        ("- generate: x", ".*steps: and below it a list"),
        ("a: [b", "it is not YAML: .*line 1"),
        ("!!python/object/apply:os.getcwd []", "it is not YAML: .*constructor"),
        ("steps: []", "steps: .*at least 1"),
        ("steps: 5", "steps: "),
        ("steps: [generate: x]\nmore: 1", "more: "),
        ("steps: [5]", r"steps\.1: a step is one of generate, judge"),
        ("steps: [{a: 1}]", r"steps\.1: a step is one of"),
        ("steps: [generate: x, {1: 2}]", r"steps\.2: a step is one of"),
        ("steps: [{generate: x, filter: y}]", r"steps\.1: a step is one of"),
        ("steps: [generate: 5]", r"steps\.1\.prompt: .*string"),
        ("steps: [generate]", r"steps\.1: give a prompt"),
        ("steps: [generate: {system: '', prompt: ''}]", r"steps\.1: give a prompt"),
        ("steps: [generate: {prompt: x, max_tokens: 0}]", r"steps\.1\.parameters\.max_tokens: .*greater"),
        ("steps: [generate: {prompt: x, colour: 1}]", r"steps\.1\.colour: "),
        ("steps: [generate: {prompt: x, max_token: 1}]", r"steps\.1\.max_token: .*mean max_tokens\?"),
        ("steps: [generate: {prompt: x, scheme: a}]", r"steps\.1\.scheme: .*mean schema\?"),
        ("steps: [generate: {prompt: x, parameters: 5}]", r"steps\.1\.parameters: "),
        ("steps: [generate: {prompt: x, stop: [a, b, c, d, e]}]", r"steps\.1\.parameters\.stop: .*at most 4"),
        ("steps: [generate: {prompt: x, name: 1 2}]", r"steps\.1\.name: "),
        ("steps: [generate: {prompt: x, name: ../x}]", r"steps\.1\.name: "),
        ("steps: [generate: {prompt: x, samples: 0}]", r"steps\.1\.samples: "),
        ("steps: [generate: {prompt: x, messages: [{role: user, content: y}]}]", r"steps\.1: give a prompt"),
        (
            "steps: [generate: {messages: [{role: bot, content: y}]}]",
            r"steps\.1\.messages\.1\.role: .*'user'",
        ),
        ("steps: [generate: {messages: [{role: user}]}]", r"steps\.1\.messages\.1\.content: "),
        ("steps: [generate: {prompt: x, raw: true, schema: a}]", r"steps\.1: raw .*schema"),
        ("steps: [generate: {prompt: x, raw: true, system: a}]", r"steps\.1: raw .*system"),
        (
            "steps: [generate: x, generate: {name: b, prompt: x, raw: true, continue: generate}]",
            r"steps\.2: raw .*continue",
        ),
        ("steps: [generate: {prompt: x, retries: 1}]", r"steps\.1: retries .*schema"),
        ("steps: [generate: {prompt: x, keep_invalid: true}]", r"steps\.1: .*keep_invalid .*schema"),
        ("steps: [judge: {prompt: x, least: high}]", r"steps\.1\.least: "),
        ("steps: [filter: {}]", r"steps\.1: say what to filter by"),
        ("steps: [filter: {column: a}]", r"steps\.1: say what to filter by"),
        ("steps: [filter: {min_chars: -1}]", r"steps\.1\.min_chars: "),
        ("steps: [expand]", r"steps\.1: "),
        ("steps: [expand: {column: a, to: ''}]", r"steps\.1\.to: "),
        ("steps: [dedupe: fuzzy]", r"steps\.1: 'fuzzy' is neither exact nor near"),
        ("steps: [dedupe: {near: 2}]", r"steps\.1\.near: "),
        ("steps: [dedupe: {near: .nan}]", r"steps\.1\.near: "),
        ("steps: [generate: x, generate: y]", "two steps are called generate"),
        ("steps: [generate: {prompt: x, continue: z}]", "generate continues z, which is no step before it"),
        ("steps: [generate: {prompt: x, continue: generate}]", ".*no step before it"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(steps.PipelineWrong, match=rf"steps\.yaml: {words}") as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(steps.PipelineWrong, match=r"none\.yaml: No such file"):
        steps.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(steps.PipelineWrong, match=r"binary\.yaml: it is not YAML"):
        steps.read(tmp_path / "binary.yaml")


@pytest.mark.parametrize("top", ["", "messages:\n"])
def test_messages_of_a_chat_are_read_in_their_order(tmp_path: Path, top: str) -> None:
    place = tmp_path / "chat.yaml"
    place.write_text(f"{top}- {{role: system, content: a}}\n- {{role: user, content: '{{{{ b }}}}'}}\n")
    found = steps.read_messages(place)
    assert [(message.role, message.content) for message in found] == [("system", "a"), ("user", "{{ b }}")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "list of messages"),
        ("[]", "list of messages"),
        ("messages: x", "list of messages"),
        ("- x", ""),
        ("- {role: user, content: a}\n- {role: user, content: 5}", r"2\.content: .*string"),
        ("- {role: user, content: a, name: b}", r"1\.name: "),
    ],
)
def test_a_wrong_chat_is_refused_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    place = tmp_path / "chat.yaml"
    place.write_text(text)
    with pytest.raises(steps.PipelineWrong, match=rf"chat\.yaml: .*{words}"):
        steps.read_messages(place)


def test_steps_of_a_program_are_taken_as_they_are_or_as_a_file_says_them() -> None:
    given: list[Any] = [steps.Expand(column="a"), {"dedupe": "exact"}]
    assert steps.pipeline(given, "pipeline").steps == (steps.Expand(column="a"), steps.Dedupe())
    with pytest.raises(steps.PipelineWrong, match=r"^pipeline: steps\.1: a step is one of"):
        steps.pipeline([{"expnd": "a"}], "pipeline")
