"""What is told of a finished run: summary.json, the dataset card, and the lines that the command prints."""

import platform
import time
from importlib import metadata
from typing import Any

import orjson

from jobs import progress, values
from jobs.dataset import calling, making, reasons, report, steps, validation
from jobs.dataset.output import card

_SERVED = {"resumed": "of an earlier run", "from_cache": "from the cache", "shared": "equal to others"}
_SHOWN_REASONS = 5
_LIBRARIES = ("longhaul", "torch", "transformers", "pyarrow", "jinja2")


def publish(made: making.Making, asked: calling.Asked) -> dict[str, Any]:
    """Write card and summary beside the rows; return the summary."""
    summary = _summary(made, asked)
    card.publish(_facts(made, asked, summary), made.directory)
    place = made.directory / "summary.json"
    unfinished = place.with_name(f".{place.name}.new")
    unfinished.write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")
    unfinished.replace(place)
    return summary


def lines(summary: dict[str, Any]) -> list[str]:
    """Return a summary in words."""
    said = [f"{values.counted(summary['rows'], 'row')} in {summary['directory']}"]
    apart = [f"{summary[name]:,} {name}" for name in ("failed", "invalid") if summary[name]]
    apart += [f"{count:,} left out by {name}" for name, count in summary["dropped"].items()]
    said += [f"  {', '.join(apart)}"] if apart else []
    said += _why(summary["reasons"])
    for name, step in summary["steps"].items():
        said += _of_step(name, step)
    cost = "" if summary["cost"] is None else f", cost {summary['cost']:,.2f}"
    said.append(f"  {summary['worker_hours']:.3f} worker-hours{cost}")
    said += [f"  {summary['directory']}/{file['name']}" for file in summary["files"]]
    return said


def _why(found: list[dict[str, Any]]) -> list[str]:
    said = [f"    {one['count']:,} {one['code']}{_first(one)}" for one in found[:_SHOWN_REASONS]]
    if more := sum(one["count"] for one in found[_SHOWN_REASONS:]):
        said.append(f"    {more:,} for other reasons, which the files below name")
    return said


def _first(one: dict[str, Any]) -> str:
    place = one["place"] and f" ({one['place']})"
    return (one["message"] and f": {one['message']}") + place


def _of_step(name: str, step: dict[str, Any]) -> list[str]:
    words = {"resumed": "of an earlier run", "from_cache": "from the cache"}
    earlier = [f"{step[key]:,} {word}" for key, word in words.items() if step[key]]
    rate = step["output_tokens_per_second"]
    said = [
        f"  {name}: {values.counted(step['requests'], 'request')}"
        + (f" ({', '.join(earlier)} beside them)" if earlier else "")
        + f", {step['prompt_tokens']:,} prompt tokens ({step['cached_tokens']:,} cached),"
        f" {step['completion_tokens']:,} output tokens in {progress.span(step['seconds'])}"
        + (f", {rate:,.1f}/s" if rate else "")
    ]
    if (p50 := step["latency_seconds"]["p50"]) is not None:
        said.append(f"    seconds a request: p50 {p50:.2f}, p90 {step['latency_seconds']['p90']:.2f}")
    return said


def _summary(made: making.Making, asked: calling.Asked) -> dict[str, Any]:
    done = made.made
    figures = {name: _step(one) for name, one in done.steps.items()}
    hours = sum(one.counts.seconds + one.counts.seconds_before for one in done.steps.values()) / 3600
    price = asked.options.cost_per_hour
    return {
        "directory": str(made.directory),
        "model": made.backend.model,
        "created_at": int(time.time()),
        "rows": done.rows,
        "failed": done.failed,
        "invalid": done.invalid,
        "dropped": done.dropped,
        "reasons": [vars(one) for one in reasons.read(made.directory)],
        "steps": figures,
        "worker_hours": round(hours, 5),
        "cost": None if price is None else round(hours * price, 4),
        "files": [vars(file) for file in done.files],
    }


def _step(told: report.Report) -> dict[str, Any]:
    counts, done = told.counts, told.counts.done
    return {
        "rows": counts.rows,
        "rows_unfit": counts.unfit,
        "requests": done.done,
        "shared": counts.shared,
        "resumed": counts.resumed,
        "from_cache": counts.cached,
        "failed": done.failed,
        "invalid": counts.invalid,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "completion_tokens": done.completion_tokens,
        "seconds": round(counts.seconds, 3),
        "output_tokens_per_second": _rate(done.completion_tokens, counts.seconds),
        "latency_seconds": {f"p{round(share * 100)}": told.latencies.at(share) for share in (0.5, 0.9, 0.99)},
    }


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 1) if seconds and tokens else None


def _facts(made: making.Making, asked: calling.Asked, summary: dict[str, Any]) -> card.Facts:
    total = [one.counts.done for one in made.made.steps.values()]
    return card.Facts(
        title=f"{made.directory.resolve().name}, generated with {made.backend.model}",
        model=made.backend.model,
        revision=made.backend.revision,
        command=asked.command,
        recipe=_recipe(made, asked),
        versions=_versions(),
        inputs=_inputs(made.source.identity()),
        counts={
            "rows": summary["rows"],
            "failed": summary["failed"],
            "invalid": summary["invalid"],
            **{f"left out by {name}": count for name, count in summary["dropped"].items()},
        },
        tokens={
            "prompt": sum(one.prompt_tokens for one in total),
            "cached": sum(one.cached_tokens for one in total),
            "generated": sum(one.completion_tokens for one in total),
        },
        files=made.made.files,
        columns={field.name: str(field.type) for field in made.prepared.schema},
    )


def _inputs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what was read: files with their sizes, or a table in memory."""
    if "files" not in found:
        return [{"path": "rows in memory"} | found]
    return [{"path": path, "bytes": size} for path, size, _ in found["files"]]


def _recipe(made: making.Making, asked: calling.Asked) -> dict[str, Any]:
    """Return what makes the rows, schemas in full: a file's name is of no use to others."""
    chosen = {
        "columns": ", ".join(asked.columns) if asked.columns else None,
        "where": asked.where,
        "limit": asked.limit,
        "format": asked.options.format,
    }
    forms = {model.step.name: model.form for model in made.prepared.models}
    said = [_said(step, forms) for step in asked.pipeline.steps]
    first = asked.pipeline.steps[0]
    if len(said) > 1 or not isinstance(first, steps.Generate):
        return {"steps": said} | chosen
    named = ("system", "prompt", "messages", "raw", "samples", "seed", "schema", "retries", "keep_invalid")
    only = said[0][first.kind]
    return {name: only.get(name) for name in named} | first.parameters.said() | chosen


def _said(step: steps.AnyStep, forms: dict[str, validation.Form | None]) -> dict[str, Any]:
    """Return what a step was told, as --pipeline takes it."""
    said = step.model_dump(mode="json", by_alias=True, exclude_defaults=True, fallback=str)
    if "schema" in said and isinstance(step, steps.Generate | steps.Judge):
        form = forms[step.name]
        said["schema"] = form.schema if form else None
    return {step.kind: said}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
