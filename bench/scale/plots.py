"""Plots of fleets. matplotlib is needed for this alone: pip install 'longhaul[bench]'"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.scale.machine import Result

NAMES = {
    "ours": "longhaul autoscale",
    "keda_defaults": "KEDA, its defaults (listLength 5)",
    "keda_128": "KEDA, listLength 128, down 1 pod a minute",
    "keda_2048": "KEDA, listLength 2048",
    "fixed_8": "8 workers, always",
}
_HOURS = 12


def _figure(height: float, rows: int = 1) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot, pyplot.subplots(rows, figsize=(9, height), sharex=True, layout="constrained")


def over_time(runs: Mapping[str, Result], path: Path) -> None:
    """Draw how many workers there were over the first hours."""
    pyplot, (figure, axes) = _figure(4.5)
    for rule, run in runs.items():
        hours = [(at - run.times[0]) / 3600 for at in run.times]
        shown = sum(hour <= _HOURS for hour in hours)
        axes.step(hours[:shown], run.workers[:shown], where="post", label=NAMES[rule], linewidth=1.2)
    axes.set(xlabel="hours", ylabel="workers", title="Workers over time: bursts of jobs (simulated)")
    axes.legend(loc="upper right", fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def ratios(found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw worker-hours as a multiple of the lower bound, by pattern and rule."""
    pyplot, (figure, axes) = _figure(4.5)
    patterns = list(next(iter(found.values())))
    width = 0.8 / len(found)
    for place, (rule, by_pattern) in enumerate(found.items()):
        left = [index + (place - len(found) / 2 + 0.5) * width for index in range(len(patterns))]
        axes.bar(left, [by_pattern[name] for name in patterns], width, label=NAMES[rule])
    axes.set_xticks(range(len(patterns)), patterns)
    axes.set(yscale="log", ylabel="worker-hours / (work / peak rate)", title="Worker-hours (simulated)")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def recorded(columns: Mapping[str, Sequence[float]], posts: Sequence[float], path: Path) -> None:
    """Draw depth, workers and tokens a second of a run over time; `posts` are when jobs came."""
    pyplot, (figure, (depth, workers, rate)) = _figure(7.0, rows=3)
    _stack(depth, columns, {"queued": "tab:orange", "leased": "tab:blue"})
    _stack(workers, columns, {"serving": "tab:green", "starting": "gold", "retiring": "silver"})
    rate.plot(columns["at"], columns["rate"], linewidth=1.2)
    for axes, label in {depth: "requests", workers: "workers", rate: "output tokens/s"}.items():
        for index, posted in enumerate(posts):
            axes.axvline(posted, color="black", linestyle=":", label="_" if index else "POST of a job")
        axes.set(ylabel=label, ylim=(0, None))
        axes.grid(alpha=0.3)
    for axes in (depth, workers):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    workers.yaxis.get_major_locator().set_params(integer=True)
    rate.set(xlabel="seconds", xlim=(0, columns["at"][-1]))
    depth.set(title="A recorded run: no worker, a job, a burst, no worker")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _stack(axes: Any, columns: Mapping[str, Sequence[float]], colors: Mapping[str, str]) -> None:
    rows = [columns[name] for name in colors]
    axes.stackplot(columns["at"], *rows, labels=list(colors), colors=list(colors.values()), step="post")
