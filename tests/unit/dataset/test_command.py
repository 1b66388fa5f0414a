"""`longhaul generate`: each option reaches what it should, and those that do not go together say so."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from jobs import cli
from jobs.dataset import calling, command, command_options, making, recipe, steps
from jobs.dataset.output import formats

USUAL = ["data.parquet", "-o", "out", "--model", "m"]


def asked(*options: str, prompt: tuple[str, ...] = ("--prompt", "{{ a }}")) -> calling.Asked:
    with command.generate.make_context("generate", [*USUAL, *prompt, *options]) as context:
        return command._asked(context.params)


def step(*options: str, **prompt: Any) -> steps.Generate:
    (made,) = asked(*options, **prompt).pipeline.steps
    assert isinstance(made, steps.Generate)
    return made


def run(*options: str) -> Result:
    return CliRunner().invoke(cli.main, ["generate", *options], prog_name="longhaul")


def test_without_options_all_is_as_its_default_says() -> None:
    made = asked()
    assert (made.place, made.output, made.model) == ("data.parquet", Path("out"), "m")
    assert (made.columns, made.where, made.limit, made.submit) == (None, None, None, None)
    assert made.options == making.Options()
    assert (made.settings, made.model_settings) == ({}, {})
    assert made.pipeline.steps == (steps.Generate(prompt="{{ a }}"),)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--columns", "a, b"], "columns", ["a", "b"]),
        (["--where", "len(a) > 1"], "where", "len(a) > 1"),
        (["--limit", "3"], "limit", 3),
        (["--submit", "http://h:1", "--api-key", "k"], "submit", "http://h:1"),
        (["--submit", "http://h:1", "--api-key", "k"], "api_key", "k"),
        (["--device", "cuda:1", "--max-running", "9"], "settings", {"device": "cuda:1", "max_running": 9}),
        (["--engine", "echo"], "model_settings", {"engine": "echo"}),
        (["--format", "jsonl"], "options", making.Options(format="jsonl")),
        (["--reorder"], "options", making.Options(reorder=True)),
        (["--overwrite"], "options", making.Options(overwrite=True)),
        (["--cache", "c"], "options", making.Options(cache=Path("c"))),
        (["--job-rows", "10"], "options", making.Options(job_requests=10)),
        (["--cost-per-hour", "2.5"], "options", making.Options(cost_per_hour=2.5)),
    ],
)
def test_an_option_of_the_run_reaches_it(options: list[str], field: str, value: Any) -> None:
    assert getattr(asked(*options), field) == value


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        (["--max-tokens", "5"], {"max_tokens": 5}),
        (["--temperature", "0"], {"temperature": 0}),
        (["--top-p", "0.5", "--top-k", "0", "--min-p", "0"], {"top_p": 0.5, "top_k": 0, "min_p": 0}),
        (["--stop", "a", "--stop", "\n"], {"stop": ("a", "\n")}),
    ],
)
def test_a_parameter_reaches_the_requests(options: list[str], parameters: dict[str, Any]) -> None:
    assert step(*options).parameters == recipe.Parameters(**parameters)


def test_samples_seed_and_form_reach_the_step() -> None:
    made = step("--samples", "4", "--seed", "7", "--schema", "s.json", "--retries", "2", "--keep-invalid")
    assert (made.samples, made.seed, made.output_schema) == (4, 7, "s.json")
    assert (made.retries, made.keep_invalid) == (2, True)
    assert step("--raw").raw


def test_a_prompt_comes_from_the_line_a_file_or_a_chat(tmp_path: Path) -> None:
    template, chat = tmp_path / "t.jinja", tmp_path / "c.yaml"
    template.write_text("ü {{ b }}\n", "utf-8")
    chat.write_text(
        "- {role: user, content: x}\n- {role: assistant, content: y}\n- {role: user, content: z}\n"
    )
    assert step("--system", "Be {{ c }}.").all_messages == (
        recipe.Message(role="system", content="Be {{ c }}."),
        recipe.Message(role="user", content="{{ a }}"),
    )
    assert step(prompt=("--template", str(template))).prompt == "ü {{ b }}\n"
    assert [m.content for m in step(prompt=("--chat", str(chat))).all_messages] == ["x", "y", "z"]


def test_filters_a_judge_and_duplicates_follow_in_this_order() -> None:
    _, texts, judge, dedupe = asked(
        *("--min-chars", "2", "--max-chars", "9", "--match", "a", "--reject", "b", "--on", "why"),
        *("--judge", "Rate {{ output }}", "--judge-least", "0", "--samples", "2", "--seed", "3"),
        *("--dedupe", "near"),
    ).pipeline.steps
    assert texts == steps.Filter(column="why", min_chars=2, max_chars=9, match="a", reject="b")
    assert judge == steps.Judge(prompt="Rate {{ output }}", best=True, least=0, seed=3)
    assert dedupe == steps.Dedupe(column="why", near=0.8)


@pytest.mark.parametrize(("way", "near"), [("exact", None), ("near", 0.8), ("0.5", 0.5)])
def test_duplicates_are_equal_or_near(way: str, near: float | None) -> None:
    assert asked("--dedupe", way).pipeline.steps[-1] == steps.Dedupe(near=near)


def test_a_judge_of_one_sample_chooses_nothing() -> None:
    judge = asked("--judge", "x").pipeline.steps[-1]
    assert isinstance(judge, steps.Judge)
    assert not judge.chooses


def test_a_pipeline_comes_from_its_file(tmp_path: Path) -> None:
    place = tmp_path / "p.yaml"
    place.write_text("steps: [generate: x, dedupe]")
    made = asked("--limit", "2", "--format", "jsonl", prompt=("--pipeline", str(place)))
    assert made.pipeline == steps.read(place)


FILE = __file__


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], ["--prompt", "--template", "--chat", "--pipeline"]),
        (["--prompt", ""], ["--prompt"]),
        (["--system", "x"], ["--prompt"]),
        (["--prompt", "x", "--template", FILE], ["--prompt", "--template"]),
        (["--prompt", "x", "--chat", FILE], ["--prompt", "--chat"]),
        (["--template", FILE, "--chat", FILE], ["--template", "--chat"]),
        (["--system", "x", "--chat", FILE], ["--system", "--chat"]),
        (["--prompt", "x", "--raw", "--system", "y"], ["--raw", "--system"]),
        (["--prompt", "x", "--raw", "--schema", "y"], ["--raw", "--schema"]),
        (["--prompt", "x", "--judge-least", "0"], ["--judge-least", "--judge"]),
        (["--prompt", "x", "--retries", "2"], ["--retries", "--schema"]),
        (["--prompt", "x", "--keep-invalid"], ["--keep-invalid", "--schema"]),
        (["--prompt", "x", "--on", "a"], ["--on", "--dedupe", "--match"]),
        (["--prompt", "x", "--submit", "http://h", "--device", "cpu"], ["--submit", "--device"]),
        (["--prompt", "x", "--submit", "http://h", "--max-running", "1"], ["--submit", "--max-running"]),
        (["--prompt", "x", "--dedupe", "alike"], ["--dedupe alike"]),
        (["--prompt", "x", "--where", "n", ">", "3"], ["extra arguments (> 3)", "in quotes"]),
    ],
)
def test_options_that_do_not_go_together_are_named(options: list[str], named: list[str]) -> None:
    result = run(*USUAL, *options)
    assert result.exit_code == 2, result.output
    for name in named:
        assert name in result.output


@pytest.mark.parametrize(
    "options",
    [
        *(["--prompt", "x"], ["--system", "x"], ["--chat", FILE], ["--template", FILE], ["--raw"]),
        *(["--samples", "1"], ["--seed", "0"], ["--schema", "x"], ["--retries", "0"], ["--keep-invalid"]),
        *(
            ["--max-tokens", "1"],
            ["--temperature", "0"],
            ["--top-p", "1"],
            ["--top-k", "1"],
            ["--min-p", "0"],
        ),
        *(["--stop", "x"], ["--min-chars", "0"], ["--max-chars", "1"], ["--match", "x"], ["--reject", "x"]),
        *(["--dedupe", "near"], ["--judge", "x"], ["--judge-least", "1"], ["--on", "output"]),
    ],
)
def test_what_belongs_into_a_pipelines_steps_is_not_passed_over(options: list[str]) -> None:
    result = run(*USUAL, "--pipeline", FILE, *options)
    assert result.exit_code == 2
    assert f"{options[0]} and --pipeline" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dedupe", "2"], "near: .*less than or equal to 1"),
        (["--dedupe", "nan"], "near: "),
        (["--stop", "a", "--stop", "b", "--stop", "c", "--stop", "d", "--stop", "e"], "stop: .*at most 4"),
        (["--seed", str(2**63)], "seed: "),
    ],
)
def test_a_value_that_no_step_takes_is_named(options: list[str], words: str) -> None:
    with pytest.raises(steps.PipelineWrong, match=rf"^The options: steps\.\d\..*{words}"):
        asked(*options)


@pytest.mark.parametrize(
    "options",
    [
        *(
            ["--samples", "0"],
            ["--temperature", "2.1"],
            ["--top-p", "0"],
            ["--limit", "0"],
            ["--format", "csv"],
        ),
        *(["--preview", "0"], ["--job-rows", "50001"], ["--cost-per-hour", "-1"], ["--template", "none.txt"]),
    ],
)
def test_a_value_out_of_its_range_is_wrong_usage(options: list[str]) -> None:
    result = run(*USUAL, "--prompt", "x", *options)
    assert result.exit_code == 2
    assert options[0] in result.output


def test_an_input_that_is_not_there_ends_the_command_in_one_line(tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.csv"), "-o", str(tmp_path / "out"), "--model", "m", "--prompt", "x")
    assert result.exit_code == 1
    assert result.output == f"longhaul: {tmp_path}/none.csv does not exist.\n"


def test_every_format_can_be_asked_for() -> None:
    assert set(command_options.FORMATS) == set(formats.FORMATS)


def test_help_fits_a_terminal_and_tells_of_every_option() -> None:
    text = run("--help").output
    assert max(map(len, text.split("\n"))) < 100
    shown = [
        option.opts[-1]
        for option in command.generate.params
        if isinstance(option, click.Option) and not option.hidden
    ]
    assert len(shown) > 30
    assert all(f"{name} " in text for name in shown)
