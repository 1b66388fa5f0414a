"""The dataset card: a dataset's README.md, as the Hugging Face hub reads it.

It says how the dataset was made, so that it can be made again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from jobs import masking, values
from jobs.dataset.output import markdown, shards, shown

_SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
    (100_000_000, "10M<n<100M"),
    (1_000_000_000, "100M<n<1B"),
    (10_000_000_000, "1B<n<10B"),
)
_LIMITS = """\
* A language model wrote the outputs, and nobody has read them all: they may be wrong, biased or unsafe, and
  may repeat what the model was trained on.
* The licences and terms of the model and of the input apply. This card names no licence: add one before you
  share the dataset.
* The same command gives the same prompts in the same order. For the same outputs, versions, model files and
  hardware must be the same as well, since floating-point sums differ between them."""


@dataclass(frozen=True)
class Facts:
    """What a card says.

    title: of the dataset, one line.
    model, revision: as they were given; the revision that was loaded, if it is known.
    command: the arguments, from "longhaul" on.
    recipe: what makes the rows: prompt, system, messages, schema, parameters, samples, seed, where, columns,
        limit, format; what is None is left out.
    versions: of longhaul, Python and libraries.
    inputs: a mapping for each input, with its path first: bytes, rows, sha256, as far as they are known.
    counts: rows, ok, failed, invalid, deduplicated, filtered and the like.
    tokens: prompt, cached, generated.
    figures: what was measured, by name, unit included in it.
    files: of the dataset; all rows of data files count for its size.
    columns: names and types.
    """

    title: str
    model: str
    command: Sequence[str]
    recipe: Mapping[str, Any]
    files: Sequence[shards.File]
    columns: Mapping[str, str]
    revision: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[Mapping[str, Any]] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)


def card(facts: Facts) -> str:
    """Return the text of README.md. Secrets that are known or look like it are masked."""
    sections = [
        f"# {markdown.words(facts.title)}",
        _opening(facts),
        "## Load it\n\n" + _loading(facts),
        "## Make it again\n\n" + markdown.fenced(shown.command(facts.command), "sh"),
        "## Recipe\n\n" + _recipe(facts),
        _values("Input", facts.inputs and _inputs(facts.inputs)),
        _values("Counts", _table("what", "number", [*facts.counts.items(), *_tokens(facts)])),
        _values("Figures", _table("figure", "value", facts.figures.items())),
        _values("Files", facts.files and _files(facts.files)),
        _values("Columns", _table("column", "type", facts.columns.items(), coded=True)),
        _values("Made with", _table("", "version", facts.versions.items())),
        "## Known limits\n\n" + _LIMITS,
    ]
    text = _front_matter(facts) + "\n\n".join(section for section in sections if section) + "\n"
    return masking.masked(text).encode("utf-8", "replace").decode()


def publish(facts: Facts, directory: Path) -> Path:
    """Write the card into a directory, at once or not at all; return its path."""
    path, new = directory / "README.md", directory / ".README.md.new"
    new.write_text(card(facts), "utf-8")
    new.replace(path)
    return path


def _front_matter(facts: Facts) -> str:
    rows = _rows(facts)
    configs = [{"config_name": name, "data_files": glob} for name, glob in _configs(facts.files).items()]
    front = {
        "pretty_name": " ".join(facts.title.split()),
        "tags": ["synthetic", "longhaul"],
        "size_categories": [next((name for most, name in _SIZES if rows < most), "10B<n<100B")],
        "configs": configs,
    }
    body = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=1_000_000)
    return f"---\n{body}---\n\n"


def _configs(files: Sequence[shards.File]) -> dict[str, str]:
    """Return the parts that can be loaded: the rows, and beside them, never among them, what was kept apart.

    `datasets` reads a directory with one reader: parts in another format than the rows' are left out.
    """
    suffix = next((file.name.rpartition(".")[2] for file in files if _is_data(file)), "parquet")
    apart = [file.name for file in files if not _is_data(file) and file.name.endswith(f".{suffix}")]
    return {"default": f"data-*.{suffix}"} | {name.partition(".")[0]: name for name in apart}


def _is_data(file: shards.File) -> bool:
    return file.name.startswith("data-")


def _rows(facts: Facts) -> int:
    return sum(file.rows for file in facts.files if _is_data(file))


def _opening(facts: Facts) -> str:
    revision = f" at revision {markdown.code(facts.revision)}" if facts.revision else ""
    rows = values.counted(_rows(facts), "row")
    return (
        f"{rows} with outputs of the language model {markdown.code(facts.model)}{revision}, "
        "made by `longhaul generate`."
    )


def _loading(facts: Facts) -> str:
    names = [name for name in _configs(facts.files) if name != "default"]
    lines = ["from datasets import load_dataset", "", 'rows = load_dataset("PATH", split="train")']
    lines += [
        f'{name} = load_dataset("PATH", "{name}", split="train")' for name in names if name.isidentifier()
    ]
    return markdown.fenced("\n".join(lines), "python")


def _recipe(facts: Facts) -> str:
    given = {name: value for name, value in facts.recipe.items() if value is not None}
    blocks = {name: value for name, value in given.items() if _is_block(name, value)}
    short = {"model": facts.model, "revision": facts.revision} | given
    rows = [(name, value) for name, value in short.items() if name not in blocks and value is not None]
    return "\n\n".join([_table("", "value", rows, coded=True), *(_block(*item) for item in blocks.items())])


def _is_block(name: str, value: Any) -> bool:
    return (
        name in ("prompt", "system") or isinstance(value, dict) or _has_objects(value) or "\n" in str(value)
    )


def _has_objects(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, dict) for item in value)


def _block(name: str, value: Any) -> str:
    if isinstance(value, str):
        return f"{markdown.words(name)}:\n\n{markdown.fenced(value, 'text')}"
    return f"{markdown.words(name)}:\n\n{markdown.fenced(_json(value, orjson.OPT_INDENT_2), 'json')}"


def _inputs(inputs: Sequence[Mapping[str, Any]]) -> str:
    heads = list(dict.fromkeys(name for one in inputs for name in one))
    rows = [
        [markdown.code(shown.url(_plain(one[name]))) if name in one else "" for name in heads]
        for one in inputs
    ]
    return markdown.table([markdown.words(name) for name in heads], rows)


def _files(files: Sequence[shards.File]) -> str:
    rows = [[markdown.code(one.name), f"{one.rows:,}", f"{one.bytes:,}", f"`{one.sha256}`"] for one in files]
    return markdown.table(["file", "rows", "bytes", "sha256"], rows)


def _tokens(facts: Facts) -> Iterable[tuple[str, int]]:
    return ((f"{name} tokens", count) for name, count in facts.tokens.items())


def _table(first: str, second: str, rows: Iterable[tuple[str, Any]], coded: bool = False) -> str:
    if coded:
        cells = [[markdown.code(name), markdown.code(_plain(value))] for name, value in rows]
    else:
        cells = [[markdown.words(name), markdown.words(_counted(value))] for name, value in rows]
    return markdown.table([first, second], cells) if cells else ""


def _values(title: str, body: Any) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _counted(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else _plain(value)


def _json(value: Any, option: int = 0) -> str:
    return orjson.dumps(value, default=str, option=option | orjson.OPT_NON_STR_KEYS).decode()
