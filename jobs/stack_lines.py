"""What `longhaul up` says of its workers: which models they run, which nobody does, and what to do then."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import hints, values


def table(rows: Mapping[str, str]) -> str:
    """Return a line for each name and value; a value of several lines stays under its beginning."""
    lines = []
    for name, value in rows.items():
        lines += [f"  {name if not at else '':<11} {part}" for at, part in enumerate(value.split("\n"))]
    return "\n".join(lines)


def chosen(model: str, served: Sequence[str]) -> list[str]:
    """Return which of the served models LONGHAUL_MODEL means, in their order."""
    if model in served:  # also one whose name has a comma
        return [model]
    if model == "all":
        return list(served)
    wanted = {name.strip() for name in model.split(",")}
    return [name for name in served if name in wanted]


def workers(pids: Sequence[int], model: str, served: Sequence[str]) -> str:
    """Return which workers there are, what each runs (its LONGHAUL_MODEL), and below it what none does."""
    run = chosen(model, served) if pids else []
    left = " or ".join(name for name in served if name not in run)
    idle = [f"nobody runs {left}: its requests wait (see below)"] if left else []
    if not pids:
        return "\n".join(["none", *idle])
    names = " and ".join(run) or "no model, steps of jobs alone"
    turns = "each takes turns over" if len(run) > 1 else "each runs" if len(pids) > 1 else "runs"
    who = f"{values.counted(len(pids), 'worker')}, pid {' and '.join(map(str, pids))}"
    return "\n".join([f"{who}: {turns} {names}", *idle])


def others(run: Sequence[str], served: Sequence[str], directory: Path, gpus: int) -> list[str]:
    """Return what to type, in one more shell, for those of the served models that no worker runs."""
    left = [name for name in served if name not in run]
    if not left:
        return []
    some = ",".join(left) if run else None
    scale = hints.with_model("longhaul autoscale" if gpus else "longhaul autoscale --cpus 2", some)
    return [
        f"A worker that runs {' and '.join(left)}, in one more shell:",
        f"  {hints.worker(some or hints.any_of(len(served)), directory)}",
        "or, as work comes and goes:",
        f"  {hints.variables(directory)}; {scale}",
    ]
