"""Make a dataset out of a dataset: read rows, render prompts, run them, write what came back."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pydantic import BaseModel

    from jobs.dataset import steps
    from jobs.dataset.input import source


def generate(
    rows: "source.Place",
    *,
    model: str,
    prompt: str | None = None,
    system: str | None = None,
    messages: "list[dict[str, str]] | None" = None,
    schema: "str | Path | dict[str, Any] | type[BaseModel] | None" = None,
    samples: int = 1,
    seed: int = 0,
    raw: bool = False,
    retries: int = 0,
    keep_invalid: bool = False,
    pipeline: "list[steps.AnyStep | dict[str, Any]] | None" = None,
    columns: "list[str] | None" = None,
    where: str | None = None,
    limit: int | None = None,
    output: str | Path | None = None,
    submit: str | None = None,
    api_key: str | None = None,
    overwrite: bool = False,
    cache: str | Path | None = None,
    quiet: bool = False,
    **parameters: Any,
) -> "pa.Table":
    """Have a model answer a prompt for each row; return the rows with what it answered, in their order.

    `rows`: a table, a list of dicts, or whatever `longhaul generate` takes as INPUT. `prompt`, `system`, and
    the contents of `messages` are Jinja2 templates over a row's columns. `schema`: a pydantic model, a JSON
    schema or a file of one: then there is a column for each property. `parameters`: max_tokens, temperature,
    top_p, top_k, min_p, stop. `pipeline`: steps in place of the one prompt. `output`: a directory to keep the
    dataset in; the same call goes on there after a crash. Without it nothing is kept. `submit`: the URL of a
    Longhaul elsewhere.

    Rows that failed are not in the table: with `output` they are in its errors.parquet. Raises
    errors.LonghaulError for all that is wrong with the call.
    """
    given = dict(locals())
    from jobs.dataset import function

    return function.generate(given)
