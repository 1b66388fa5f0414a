"""`dataset.generate`: a run as a call from Python."""

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.dataset import calling, making, publishing, report, steps
from jobs.dataset.output import shards

_USUAL = {
    "prompt": None, "system": None, "schema": None, "samples": 1, "seed": 0, "raw": False, "retries": 0,
    "keep_invalid": False,
}  # fmt: skip
"""What of one step the function takes itself, and what it is when nothing is said."""


def generate(given: dict[str, Any]) -> pa.Table:
    """Run what `dataset.generate` was called with."""
    if given["output"] is not None:
        return _run(given, Path(given["output"]))
    with tempfile.TemporaryDirectory() as place:
        return _run(given, Path(place) / "dataset")


def _run(given: dict[str, Any], output: Path) -> pa.Table:
    view = report.Silent() if given["quiet"] else report.view()
    asked = _asked(given, output)
    with calling.opened(asked, view) as made, view:
        made.check_recipes()
        made.look()
        made.write()
        publishing.publish(made, asked)
    tables = [pq.read_table(path) for path in shards.present(output)]
    return pa.concat_tables(tables)


def _asked(given: dict[str, Any], output: Path) -> calling.Asked:
    engine = {
        name: given["parameters"].pop(name)
        for name in ("max_running", "device")
        if name in given["parameters"]
    }
    model = {name: given["parameters"].pop(name) for name in ("engine",) if name in given["parameters"]}
    return calling.Asked(
        place=given["rows"],
        output=output,
        model=given["model"],
        pipeline=_pipeline(given),
        columns=given["columns"],
        where=given["where"],
        limit=given["limit"],
        options=making.Options(
            overwrite=given["overwrite"], cache=Path(given["cache"]) if given["cache"] is not None else None
        ),
        submit=given["submit"],
        api_key=given["api_key"],
        settings=engine,
        model_settings=model,
        command=("jobs.dataset.generate",),
    )


def _pipeline(given: dict[str, Any]) -> steps.Pipeline:
    said = {name: given[name] for name in _USUAL}
    if given["pipeline"] is not None:
        of_a_step = [name for name, usual in _USUAL.items() if said[name] != usual]
        of_a_step += ["messages"] * (given["messages"] is not None) + list(given["parameters"])
        if of_a_step:
            raise steps.PipelineWrong(place=of_a_step[0], reason="it goes into a step of the pipeline")
        return steps.pipeline(given["pipeline"], "pipeline")
    if given["messages"] is not None:
        said["messages"] = given["messages"]
    return steps.pipeline([{"generate": said | given["parameters"]}], "generate")
