"""What is so before the first token: rows are counted, prompts may still be changed, mistakes are named."""

from pathlib import Path

import orjson
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from jobs import dataset
from jobs.dataset import command, making, steps
from jobs.dataset.input import source
from worker.engine import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"text": f"text {n % 2}"}) + b"\n" for n in range(2500)))
    return path


def generate(rows: Path, model: str, *more: str) -> Result:
    said = [str(rows), "-o", str(rows.parent / "out"), "--model", model, "--engine", "echo"]
    short = () if "--pipeline" in more else ("--max-tokens", "4")
    return CliRunner().invoke(command.generate, [*said, *short, *more])


def test_no_more_rows_are_counted_than_the_limit_lets_through(rows: Path) -> None:
    assert making.counted(source.open_source(str(rows), limit=50)) == 50
    assert making.counted(source.open_source(str(rows), limit=1050, where="text = 'text 0'")) == 1050


def test_a_prompt_may_be_changed_after_a_preview_but_not_after_a_run(rows: Path, model: str) -> None:
    for prompt in ("One {{ text }}", "Two {{ text }}"):
        assert generate(rows, model, "--prompt", prompt, "--preview", "1").exit_code == 0
    assert generate(rows, model, "--prompt", "Three {{ text }}", "--limit", "2").exit_code == 0
    refused = generate(rows, model, "--prompt", "Four {{ text }}", "--limit", "2")
    assert "-user: Three {{ text }}\n+user: Four {{ text }}" in str(refused.exception)


def test_what_is_left_out_is_counted_by_the_name_of_its_step(rows: Path, model: str) -> None:
    asked = ("--prompt", "{{ text }}", "--temperature", "0", "--limit", "10", "--dedupe", "exact")
    result = generate(rows, model, *asked, "--min-chars", "0", "--max-chars", "1000", "--json")
    assert result.exit_code == 0, result.exception
    summary = orjson.loads(result.stdout)
    assert summary["dropped"] == {"dedupe": 10 - summary["rows"]}


def test_rows_are_counted_by_an_expression_about_no_column(rows: Path) -> None:
    assert making.counted(source.open_source(str(rows), where="1 = 1")) == 2500
    assert making.counted(source.open_source(str(rows), where="1 = 2")) == 0


def test_rows_are_sorted_in_a_directory_that_is_new(rows: Path, model: str) -> None:
    made = generate(rows, model, "--prompt", "{{ text }}", "--reorder", "--limit", "4", "--format", "jsonl")
    assert made.exit_code == 0, made.exception
    lines = (rows.parent / "out" / "data-00000.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["text"] for line in lines] == ["text 0", "text 1"] * 2


def test_what_is_read_once_may_go_to_a_directory_that_is_new(model: str, tmp_path: Path) -> None:
    reader = pa.table({"text": ["a", "b"]}).to_reader()
    made = dataset.generate(
        reader,
        model=model,
        engine="echo",
        prompt="{{ text }}",
        max_tokens=4,
        output=tmp_path / "out",
        quiet=True,
    )
    assert made["text"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize("more", [("--samples", "2"), ("--temperature", "0"), ("--min-chars", "3")])
def test_options_of_a_step_are_not_dropped_beside_a_pipeline(
    rows: Path, model: str, more: tuple[str, str]
) -> None:
    pipeline = rows.parent / "steps.yaml"
    pipeline.write_text("steps: [{generate: 'Say {{ text }}'}]")
    refused = generate(rows, model, "--pipeline", str(pipeline), *more)
    assert refused.exit_code == 2
    assert f"{more[0]} and --pipeline" in refused.stderr


@pytest.mark.parametrize(
    "more", [{"schema": {"type": "object"}}, {"system": "You."}, {"name": "b", "continue": "a"}]
)
def test_raw_takes_one_text_alone(more: dict[str, object]) -> None:
    first = {"generate": {"name": "a", "prompt": "{{ text }}"}}
    with pytest.raises(steps.PipelineWrong, match="raw completes one text"):
        steps.pipeline([first, {"generate": {"prompt": "{{ text }}", "raw": True} | more}], "here")


def test_the_steps_of_the_card_are_those_that_a_pipeline_takes(rows: Path, model: str) -> None:
    schema = rows.parent / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    asked = ("--prompt", "{{ text }}", "--schema", str(schema), "--limit", "2", "--dedupe", "exact")
    assert generate(rows, model, *asked, "--on", "text").exit_code in (0, 3)
    card = (rows.parent / "out" / "README.md").read_text()
    listed = orjson.loads(card.partition("steps:\n\n```json\n")[2].partition("\n```")[0])
    found = steps.pipeline(listed, "card").steps
    assert [step.kind for step in found] == ["generate", "dedupe"]
    assert listed[0]["generate"]["schema"]["properties"] == {"n": {"type": "integer"}}
    assert listed[0]["generate"]["parameters"] == {"max_tokens": 4}


def test_a_dataset_that_was_made_is_an_input(rows: Path, model: str) -> None:
    bad = rows.parent / "bad.jsonl"
    bad.write_bytes(b'{"text": "a"}\nbroken\n')
    assert generate(bad, model, "--prompt", "{{ text }}").exit_code == 3
    made = source.open_source(str(rows.parent / "out"))
    assert [row["text"] for each in made.rows() for row in each.batch.to_pylist()] == ["a"]
