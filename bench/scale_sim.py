"""Simulate rules of scaling over arrival patterns: ours (jobs.scaling), KEDA's, and a fixed fleet.

What is modelled and what is not stands in bench/scale/machine.py, the patterns in bench/scale/patterns.py,
the rules in bench/scale/rules.py. With --json a figure is one line:

  bound_hours      work / peak rate: no fleet takes less
  bound_seconds    mean time of a job with all workers there from the first arrival on, but for one start-up
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.scale import machine, patterns, plots, rules, tables
from jobs import scaling

MOST = 32
CHOSEN_ON = ("poisson", "bursts", "long_tail", "deadlines")
CHOSEN_SEEDS = (0, 1, 2)
SHOWN_SEEDS = (100, 101, 102)
TIME_WEIGHT = 0.25
"""How much time counts against worker-hours when defaults are chosen: hours * time ** this is least."""
_GRID: dict[str, tuple[float, ...]] = {
    "target_seconds": (300, 600, 900, 1800),
    "spare_seconds": (15, 60, 120),
    "idle_seconds": (30, 60, 180),
    "startup_patience": (0.5, 1.0, 2.0),
    "startup_share": (0.1, 0.2, 0.4),
    "fill": (0.25, 0.5, 0.75),
}
Made = Callable[[int, machine.Machine], machine.Scaler]
RULES: dict[str, Made] = {
    "ours": lambda most, one: rules.Ours(scaling.Policy(most=most), one),
    "keda_defaults": lambda most, one: rules.Keda(5, most),
    "keda_128": lambda most, one: rules.Keda(128, most, down=1),
    "keda_2048": lambda most, one: rules.Keda(2048, most),
    "fixed_8": lambda most, one: rules.Fixed(min(8, most)),
}


_SEED = click.IntRange(min=0)
_COUNT = click.IntRange(min=1)
_JSON = click.option("as_json", "--json", is_flag=True, help="Print JSON lines in place of a table.")


def _seconds(context: click.Context, option: click.Parameter, value: float) -> float:
    if not 0 <= value <= patterns.DAY:
        raise click.BadParameter(f"{value} is not within a day")
    return value


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Simulate how workers are scaled."""


@main.command(short_help="Compare all rules on patterns of arrivals.")
@click.option(
    "--seed",
    "seeds",
    type=_SEED,
    multiple=True,
    default=SHOWN_SEEDS,
    show_default=True,
    help="Draws the arrivals. Repeatable: hours are summed over seeds.",
)
@click.option(
    "--pattern",
    "names",
    type=click.Choice(list(patterns.PATTERNS)),
    multiple=True,
    help="Repeatable.  [default: all]",
)
@click.option(
    "--startup",
    type=float,
    default=machine.Machine.startup_seconds,
    show_default=True,
    callback=_seconds,
    help="Seconds that a worker takes to start; once for all rules.",
)
@click.option("--most", type=_COUNT, default=MOST, show_default=True, help="Most workers.")
@_JSON
def compare(seeds: tuple[int, ...], names: tuple[str, ...], startup: float, most: int, as_json: bool) -> None:
    """Compare all rules on patterns of arrivals.

    Figures are summed over seeds that no default was chosen on. Of all patterns it takes about three minutes.
    """
    one = machine.Machine(startup_seconds=startup)
    rows = []
    for name, rule in itertools.product(names or patterns.PATTERNS, RULES):
        click.echo(f"simulating {name}: {rule}", err=True)
        row = {"figure": "compare", "pattern": name, "rule": rule} | _summed(name, rule, seeds, one, most)
        rows.append(row)
        if as_json:
            _print(**row)
    if not as_json:
        click.echo(tables.compared(rows))


@main.command(short_help="Choose the policy's defaults.")
@_JSON
def choose(as_json: bool) -> None:
    """Choose the policy's defaults, one of them after another, twice, on the patterns for that.

    The score is worker-hours times the fourth root of the mean time of a job: less is better.
    """
    one = machine.Machine()
    policy = scaling.Policy(most=MOST)
    for _, (field, values) in itertools.product(range(2), _GRID.items()):
        click.echo(f"trying {field}: {', '.join(f'{value:g}' for value in values)}", err=True)
        scored = [(_score(replace(policy, **{field: value}), one), value) for value in values]
        best = min(score for score, _ in scored)
        value = max(value for score, value in scored if score <= best * 1.001)  # of equals the calmest
        policy = replace(policy, **{field: value})
        scores = {str(value): round(score, 4) for score, value in scored}
        if as_json:
            _print(figure="choose", field=field, value=value, score=round(best, 4), scores=scores)
        else:
            click.echo(f"{field} = {value:g}, score {best:.4f} of {scores}")


@main.command(short_help="Run ten million requests on thousands of workers.")
@click.option("--workers", type=_COUNT, default=5000, show_default=True, help="Most workers.")
@_JSON
def large(workers: int, as_json: bool) -> None:
    """Run ten million requests on thousands of workers, and say how long that takes to simulate.

    The fewer workers, the more there is to simulate: with one it takes half a minute.
    """
    one = machine.Machine()
    jobs = patterns.build("giant", 0)
    rows: list[dict[str, Any]] = []
    for rule in ("ours", "keda_defaults", "keda_128"):
        click.echo(f"simulating {rule}", err=True)
        started = time.perf_counter()
        found = machine.simulate(jobs, RULES[rule](workers, one), one)
        seconds = time.perf_counter() - started
        row = {
            "figure": "large",
            "rule": rule,
            "requests": int(jobs.requests.sum()),
            "most": workers,
            "most_at_once": max(found.workers),
            "simulated_in_seconds": round(seconds, 2),
        }
        rows.append(row | _facts(jobs, found, one))
        if as_json:
            _print(**rows[-1])
    if not as_json:
        shown = ("rule", "requests", "most_at_once", "simulated_in_seconds", "worker_hours", "makespan")
        click.echo(tables.of(rows, *shown))


@main.command("plots", short_help="Draw the pictures of docs/scaling.md.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("docs"),
    show_default=True,
    help="Where the pictures go.",
)
@click.option("--seed", type=_SEED, default=SHOWN_SEEDS[0], show_default=True, help="Draws the arrivals.")
def plots_command(output: Path, seed: int) -> None:
    """Draw docs/scaling_bursts.png and docs/scaling_hours.png."""
    one = machine.Machine()
    shown = ("ours", "keda_defaults", "keda_128")
    jobs = patterns.build("bursts", seed)
    runs = {rule: machine.simulate(jobs, RULES[rule](MOST, one), one) for rule in shown}
    plots.over_time(runs, output / "scaling_bursts.png")
    ratios = {
        rule: {
            name: found["worker_hours"] / found["bound_hours"]
            for name in patterns.PATTERNS
            for found in [_summed(name, rule, (seed,), one, MOST)]
        }
        for rule in RULES
    }
    plots.ratios(ratios, output / "scaling_hours.png")


def _summed(name: str, rule: str, seeds: Iterable[int], one: machine.Machine, most: int) -> dict[str, Any]:
    """Return the figures of a rule on a pattern over seeds: sums, and means of times."""
    found = []
    for seed in seeds:
        jobs = patterns.build(name, seed)
        made = machine.simulate(jobs, RULES[rule](most, one), one, seed=seed)
        best = machine.simulate(jobs, rules.Fixed(most), one, seed=seed)
        bound = {"bound_seconds": _mean_seconds(jobs, best), "bound_makespan": best.makespan}
        found.append(_facts(jobs, made, one) | bound)
    totals = {key: sum(each[key] for each in found) for key in found[0]}
    means = ("mean_seconds", "bound_seconds", "makespan", "bound_makespan")
    return {key: round(value / (len(found) if key in means else 1), 2) for key, value in totals.items()}


def _facts(jobs: patterns.Jobs, found: machine.Result, one: machine.Machine) -> dict[str, Any]:
    return {
        "worker_hours": round(found.worker_hours, 2),
        "bound_hours": round(float(jobs.work.sum()) / one.peak / 3600, 2),
        "deadline_misses": found.deadline_misses,
        "jobs": len(jobs.arrival),
        "mean_seconds": round(_mean_seconds(jobs, found), 1),
        "makespan": round(found.makespan, 1),
        "starts": found.starts,
    }


def _mean_seconds(jobs: patterns.Jobs, found: machine.Result) -> float:
    return float((found.finished - jobs.arrival).mean())


def _score(policy: scaling.Policy, one: machine.Machine) -> float:
    """Return the geometric mean of hours to the bound, times the weighted one of times to KEDA's defaults.

    A deadline missed that KEDA's defaults do not miss costs as much as a tenth more of everything.
    """
    logs = []
    for jobs, hours, seconds, misses in _yardsticks(one):
        made = machine.simulate(jobs, rules.Ours(policy, one), one)
        worse = max(0, made.deadline_misses - misses)
        logs.append(
            math.log(made.worker_hours / hours)
            + TIME_WEIGHT * math.log(_mean_seconds(jobs, made) / seconds)
            + 0.1 * worse
        )
    return math.exp(sum(logs) / len(logs))


_KNOWN: list[tuple[patterns.Jobs, float, float, int]] = []


def _yardsticks(one: machine.Machine) -> Iterator[tuple[patterns.Jobs, float, float, int]]:
    """Yield the jobs that defaults are chosen on, with bound hours, and KEDA's mean seconds and misses."""
    if not _KNOWN:
        for name, seed in itertools.product(CHOSEN_ON, CHOSEN_SEEDS):
            jobs = patterns.build(name, seed)
            keda = machine.simulate(jobs, rules.Keda(5, MOST), one)
            hours = float(jobs.work.sum()) / one.peak / 3600
            _KNOWN.append((jobs, hours, _mean_seconds(jobs, keda), keda.deadline_misses))
    yield from _KNOWN


def _print(**figure: Any) -> None:
    click.echo(json.dumps(figure))


if __name__ == "__main__":
    main()
