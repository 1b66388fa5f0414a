import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from jobs import masking
from jobs.dataset.output import card, markdown, shards

WITHOUT_CONTROL = dict.fromkeys(map(ord, "\r\0\u2028\ufffd"))
HOSTILE = "Say {{ text }}\n````\n---\nlicense: mit\n~~~\n</details> | `x`\r\n```python"


def facts(**changes: Any) -> card.Facts:
    values: dict[str, Any] = {
        "title": "Stories for children",
        "model": "org/model",
        "command": [
            "longhaul",
            "generate",
            "data.parquet",
            "--prompt",
            "Say {{ text }}",
            "--max-tokens",
            "20",
        ],
        "recipe": {
            "prompt": "Say {{ text }}",
            "system": None,
            "parameters": {"max_tokens": 20},
            "seed": 1234567,
        },
        "files": [
            file("data-00000.parquet", 900),
            file("data-00001.parquet", 600),
            file("errors.parquet", 7),
        ],
        "columns": {"text": "string", "output": "string"},
    }
    return card.Facts(**values | changes)


def file(name: str, rows: int) -> shards.File:
    return shards.File(name, rows, 100, "ab" * 32)


def front_matter(text: str) -> dict[str, Any]:
    """Read what stands between the two lines of dashes, as the hub does."""
    found = re.match(r"\s*---[\r\n]+([\S\s]*?)[\r\n]+---(\r\n|\n|$)", text)
    assert found
    loaded: dict[str, Any] = yaml.safe_load(found[1])
    return loaded


def parsed(text: str) -> list[Token]:
    """Return the parts of what stands below the front matter."""
    return MarkdownIt("commonmark").enable("table").parse(text.split("\n---\n", 1)[1])


def headings(tokens: list[Token]) -> list[str]:
    return [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]


def test_the_hub_finds_the_rows_apart_from_errors_and_no_licence() -> None:
    front = front_matter(card.card(facts()))
    assert front == {
        "pretty_name": "Stories for children",
        "tags": ["synthetic", "longhaul"],
        "size_categories": ["1K<n<10K"],
        "configs": [
            {"config_name": "default", "data_files": "data-*.parquet"},
            {"config_name": "errors", "data_files": "errors.parquet"},
        ],
    }


def test_a_part_in_another_format_than_the_rows_is_not_offered_since_it_would_not_load() -> None:
    files = [file("data-00000.jsonl", 1), file("errors.parquet", 1), file("invalid.jsonl", 1)]
    text = card.card(facts(files=files))
    assert front_matter(text)["configs"] == [
        {"config_name": "default", "data_files": "data-*.jsonl"},
        {"config_name": "invalid", "data_files": "invalid.jsonl"},
    ]
    assert 'load_dataset("PATH", "errors"' not in text
    assert "`errors.parquet`" in text


@pytest.mark.parametrize(
    ("rows", "size"),
    [(0, "n<1K"), (999, "n<1K"), (1_000, "1K<n<10K"), (10_000_000, "10M<n<100M"), (10**9, "1B<n<10B")],
)
def test_the_size_is_one_that_the_hub_knows(rows: int, size: str) -> None:
    files = [file("data-00000.jsonl", rows)]
    assert front_matter(card.card(facts(files=files)))["size_categories"] == [size]


@pytest.mark.parametrize(
    "title", [HOSTILE, "a: b", "# x", "- y", "'\"", "---", "\n---\nlicense: mit", "null"]
)
def test_a_title_stays_a_title(title: str) -> None:
    text = card.card(facts(title=title))
    front = front_matter(text)
    assert front["pretty_name"] == " ".join(title.split())
    assert "license" not in front
    assert sum(line.startswith("# ") for line in text.split("\n")) == 1 + title.count("\n# ")


MARKS = [
    "`",
    "```",
    "````",
    "~~~",
    "\n",
    "\n---\n",
    "|",
    "\\",
    "<b>",
    "<!--",
    "# x",
    "* ",
    "\t",
    "\r",
    "    ",
]
TEXTS = st.lists(
    st.sampled_from([*MARKS, "a", "{{ x }}", "[a](b)", "> ", "1. ", "\x00", "\u2028"]), max_size=10
)
ORDER = [
    "Load it",
    "Make it again",
    "Recipe",
    "Input",
    "Counts",
    "Figures",
    "Files",
    "Columns",
    "Known limits",
]


@settings(max_examples=100, deadline=None)
@example([HOSTILE] * 8)
@given(st.lists(TEXTS.map("".join), min_size=8, max_size=8))
def test_no_text_of_the_users_gets_out_of_its_place(texts: list[str]) -> None:
    model, prompt, where, column, kind, path, figure, words = texts
    text = card.card(
        facts(
            model=model,
            command=["longhaul", "generate", words],
            recipe={
                "prompt": prompt,
                "where": where.replace("\n", " "),
                "messages": [{"role": "user", "content": words}],
            },
            columns={column: kind},
            inputs=[{"path": path}],
            figures={figure: 1},
            counts={figure: 1},
        )
    )
    tokens = parsed(text)
    assert headings(tokens)[1:] == ORDER
    parts = [part for token in tokens for part in (token, *(token.children or ()))]
    kinds = {part.type for part in parts}
    assert not kinds & {
        "html_block",
        "html_inline",
        "hr",
        "blockquote_open",
        "code_block",
        "link_open",
        "image",
    }
    fences = [token.content for token in tokens if token.type == "fence"]
    assert len(fences) == 4
    assert fences[2].translate(WITHOUT_CONTROL) == prompt.translate(WITHOUT_CONTROL) + "\n"
    cells = [part.type for part in parts].count("td_open")
    assert cells == 2 * 2 + 1 + 2 + 2 + 3 * 4 + 2
    assert front_matter(text)["pretty_name"] == "Stories for children"


def test_the_command_can_be_pasted() -> None:
    command = [
        "longhaul",
        "generate",
        "my data.parquet",
        "--prompt",
        "it's {{ a }}\n$HOME `x`",
        "--max-tokens",
        "9",
    ]
    text = card.card(facts(command=command))
    block = re.search(r"## Make it again\n\n(`+)sh\n([\S\s]*?)\n\1\n", text)
    assert block
    assert shlex.split(block[2]) == command


@pytest.mark.parametrize(
    "given",
    [
        ["--api-key", "SECRET", "--seed", "7"],
        ["--api-key=SECRET", "--seed", "7"],
        ["--submit", "https://user:SECRET@host/v1", "--seed", "7"],
        ["--submit=https://user:SECRET@host/v1", "--seed", "7"],
        ["https://host/data.parquet?X-Amz-Signature=SECRET&part=1", "--seed", "7"],
    ],
)
def test_no_secret_of_the_command_is_published(given: list[str]) -> None:
    text = card.card(facts(command=["longhaul", "generate", *given]))
    assert "SECRET" not in text
    assert "--seed 7" in text


def test_no_secret_of_the_input_or_the_environment_is_published() -> None:
    masking.learn(["hidden-in-the-prompt"])
    text = card.card(
        facts(
            recipe={"prompt": "hidden-in-the-prompt"}, inputs=[{"path": "s3://k:SECRET@bucket/a", "bytes": 1}]
        )
    )
    assert "SECRET" not in text
    assert "hidden-in-the-prompt" not in text
    assert "s3://k:***@bucket/a" in text


def test_the_recipe_is_shown_as_it_was_given() -> None:
    text = card.card(facts(revision="abc123"))
    assert "| `seed` | `1234567` |" in text
    assert "```text\nSay {{ text }}\n```" in text
    assert '"max_tokens": 20' in text
    assert "`org/model` at revision `abc123`" in text
    assert "system" not in text.split("## Recipe")[1].split("##")[0]


def test_everything_that_was_counted_is_shown() -> None:
    text = card.card(
        facts(
            counts={"failed": 12345},
            tokens={"generated": 777},
            figures={"tokens/s": 1234.5},
            versions={"torch": "2.8"},
        )
    )
    for row in (
        "| failed | 12,345 |",
        "| generated tokens | 777 |",
        "| tokens/s | 1,234.5 |",
        "| torch | 2.8 |",
    ):
        assert row in text
    assert f"| `data-00001.parquet` | 600 | 100 | `{'ab' * 32}` |" in text


def test_a_text_that_is_no_unicode_can_be_written(tmp_path: Path) -> None:
    path = card.publish(facts(command=["longhaul", "generate", "bad\udcff.csv"]), tmp_path)
    assert path.name == "README.md"
    assert "bad?.csv" in path.read_text("utf-8")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "shown"), [("a`b", "``a`b``"), ("`", "`` ` ``"), ("a|b", r"`a\|b`"), ("a\nb", "`a b`")]
)
def test_a_code_span_holds_any_text(text: str, shown: str) -> None:
    assert markdown.code(text) == shown
