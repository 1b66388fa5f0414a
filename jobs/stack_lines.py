"""What `longhaul up` says of its workers: which models they run, and which nobody does."""

from collections.abc import Sequence

_WAITING = "requests for it wait for a worker, of 'longhaul autoscale' for example"


def chosen(model: str, served: Sequence[str]) -> list[str]:
    """Return which of the served models LONGHAUL_MODEL means, in their order."""
    if model in served:  # also one whose name has a comma
        return [model]
    if model == "all":
        return list(served)
    wanted = {name.strip() for name in model.split(",")}
    return [name for name in served if name in wanted]


def workers(pids: Sequence[int], model: str, served: Sequence[str]) -> str:
    """Return which workers there are, what each runs (its LONGHAUL_MODEL), and what none does."""
    run = chosen(model, served) if pids else []
    left = " or ".join(name for name in served if name not in run)
    idle = [f"nobody runs {left}: {_WAITING}"] if left else []
    if not pids:
        return "; ".join(["none", *idle])
    names = " and ".join(run) or "no model, steps of jobs alone"
    turns = "each takes turns over" if len(run) > 1 else "each runs" if len(pids) > 1 else "runs"
    return "; ".join([", ".join(f"pid {pid}" for pid in pids), f"{turns} {names}", *idle])
