"""The simulator of scaling: its physics, KEDA's arithmetic, and that its patterns are what they say."""

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import scale_sim
from bench.scale import machine, patterns, rules, tables
from bench.scale.machine import Machine, View
from bench.scale.patterns import Jobs
from jobs import scaling

ONE = Machine(startup_seconds=100, decode_seconds=0.0)


def jobs(*facts: tuple[float, float]) -> Jobs:
    """Jobs of (arrival, requests) with 1000 tokens a request, due in a day."""
    arrival, requests = (np.array(values, dtype=float) for values in zip(*facts, strict=True))
    many = len(facts)
    return Jobs(arrival, requests, np.full(many, 1000.0), np.full(many, 100.0), arrival + patterns.DAY)


def first(work: Jobs, count: int) -> Jobs:
    """Return the first jobs of a pattern."""
    return Jobs(*(getattr(work, field.name)[:count] for field in fields(work)))


def view(shown: int, serving: int, now: float = 0.0, starting: int = 0) -> View:
    return View(now, shown, 0, shown, 0.0, 0.0, (), serving, starting)


def test_a_fixed_fleet_takes_its_start_and_the_work_at_its_peak() -> None:
    found = machine.simulate(jobs((0, 20_000)), rules.Fixed(4), ONE)
    assert found.makespan == pytest.approx(100 + 20_000 * 1000 / (4 * ONE.peak), rel=0.05)
    assert found.worker_hours >= 20_000 * 1000 / ONE.peak / 3600


def test_a_worker_with_few_requests_is_slower_for_all_and_faster_for_each() -> None:
    assert ONE.rate(64) == ONE.rate(1000) == ONE.peak
    assert ONE.rate(1) < ONE.rate(32) < ONE.peak
    assert ONE.rate(1) > ONE.rate(32) / 32


def test_the_longest_request_holds_its_job_up_and_a_worker() -> None:
    slow = replace(ONE, decode_seconds=10.0)
    work = jobs((0, 640))
    quick = machine.simulate(work, rules.Ours(scaling.Policy(most=4), ONE), ONE)
    held = machine.simulate(work, rules.Ours(scaling.Policy(most=4), slow), slow)
    assert held.makespan - quick.makespan == pytest.approx(1000, abs=10)
    assert held.worker_hours - quick.worker_hours == pytest.approx(1000 / 3600, rel=0.3)


def test_jobs_share_by_fair_turns_so_a_small_one_does_not_wait_for_a_large_one() -> None:
    found = machine.simulate(jobs((0, 50_000), (1000, 50)), rules.Fixed(2), ONE)
    assert found.finished[1] - 1000 < 60 < found.finished[0] - 1000


def test_what_is_shared_is_all_there_is_and_none_gets_more_than_it_wants() -> None:
    shares = machine._max_min(np.array([1.0, 50.0, 500.0]), 101.0)
    assert shares.tolist() == [1.0, 50.0, 50.0]
    assert machine._max_min(np.array([1.0, 5.0]), 100.0).tolist() == [1.0, 5.0]


@pytest.mark.parametrize("rule", scale_sim.RULES)
def test_no_rule_takes_less_than_the_bound_or_leaves_work(rule: str) -> None:
    work = first(patterns.build("deadlines", 5), 20)
    found = machine.simulate(work, scale_sim.RULES[rule](16, ONE), ONE)
    assert np.isfinite(found.finished).all()
    assert (found.finished > work.arrival).all()
    assert found.worker_hours > work.work.sum() / ONE.peak / 3600
    assert max(found.workers) <= 40, "16, and those that still finish what they had"


def test_keda_wants_the_depth_over_the_target_and_grows_in_steps() -> None:
    keda = rules.Keda(128, most=100)
    assert keda.decide(view(0, 0)) == 0
    assert keda.decide(view(10_000, 0, now=15)) == 0, "it polls every 30 s"
    assert keda.decide(view(10_000, 0, now=30)) == 1
    assert keda.decide(view(10_000, 0, now=45, starting=1)) == 5, "4 more at a time"
    assert keda.decide(view(10_000, 5, now=60)) == 10, "then as many again"
    assert keda.decide(view(10_000, 40, now=75)) == 79


def test_keda_does_nothing_within_its_tolerance() -> None:
    assert rules.Keda(100, most=100).decide(view(1090, 10)) == 10
    assert rules.Keda(100, most=100).decide(view(1110, 10)) == 12


def test_keda_goes_down_after_five_minutes_and_by_a_pod_a_minute_if_told_to() -> None:
    keda, slow = rules.Keda(100, most=100), rules.Keda(100, most=100, down=1)
    for rule in (keda, slow):
        assert rule.decide(view(1000, 10, now=0)) == 10
        assert rule.decide(view(100, 10, now=290)) == 10
    assert keda.decide(view(100, 10, now=301)) == 1
    assert slow.decide(view(100, 10, now=301)) == 9
    assert slow.decide(view(100, 9, now=330)) == 9
    assert slow.decide(view(100, 9, now=362)) == 8


def test_keda_ends_the_last_one_five_minutes_after_the_last_work() -> None:
    keda = rules.Keda(100, most=100)
    assert keda.decide(view(5, 1, now=0)) == 1
    assert keda.decide(view(0, 1, now=299)) == 1
    assert keda.decide(view(0, 1, now=300)) == 0


@pytest.mark.parametrize("name", patterns.PATTERNS)
def test_patterns_are_sorted_and_the_same_for_a_seed(name: str) -> None:
    first, again, other = (patterns.build(name, seed) for seed in (1, 1, 2))
    assert (first.work == again.work).all()
    assert len(first.work) != len(other.work) or (first.arrival != other.arrival).any()
    assert (np.diff(first.arrival) >= 0).all()
    assert (first.requests >= 1).all()
    assert (first.requests <= patterns.MOST_REQUESTS).all()
    assert (first.deadline > first.arrival).all()


def test_ten_million_requests_on_thousands_of_workers_are_simulated() -> None:
    result = CliRunner().invoke(scale_sim.main, ["large", "--json"], catch_exceptions=False)
    lines = result.stdout.splitlines()
    assert result.stderr.splitlines()[0] == "simulating ours"
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert {line["requests"] for line in found} == {10_000_000}
    assert max(line["most_at_once"] for line in found) == 5000
    assert all(line["simulated_in_seconds"] < 20 for line in found)


def test_ours_takes_fewer_worker_hours_than_kedas_defaults_and_misses_no_more() -> None:
    one, work = Machine(), first(patterns.build("deadlines", 12), 40)
    ours, keda = (
        machine.simulate(work, scale_sim.RULES[rule](32, one), one, seed=12)
        for rule in ("ours", "keda_defaults")
    )
    assert ours.worker_hours < keda.worker_hours / 2
    assert ours.deadline_misses <= keda.deadline_misses


def test_a_comparison_is_a_line_for_each_rule_with_bounds_that_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = {"trickle": lambda rng: first(patterns.trickle(rng), 200)}
    monkeypatch.setattr(patterns, "PATTERNS", patterns.PATTERNS | short)
    arguments = ["compare", "--seed", "3", "--pattern", "trickle"]
    output = CliRunner().invoke(scale_sim.main, [*arguments, "--json"]).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["rule"] for row in rows] == list(scale_sim.RULES)
    assert all(row["worker_hours"] > row["bound_hours"] for row in rows)
    assert all(row["mean_seconds"] >= row["bound_seconds"] - 1 for row in rows)
    shown = CliRunner().invoke(scale_sim.main, arguments).stdout.splitlines()
    assert shown[1].split() == ["pattern", "jobs", "bound", *scale_sim.RULES]
    assert shown[2].split()[:2] == ["trickle", "200"]


def test_a_table_tells_deadlines_that_were_missed() -> None:
    row = {"pattern": "p", "jobs": 1200, "bound_hours": 1.25, "bound_seconds": 3.0, "mean_seconds": 44.4}
    rows = [
        row | {"rule": "a", "worker_hours": 1234.5, "deadline_misses": 3},
        row | {"rule": "b", "worker_hours": 2.25, "deadline_misses": 0},
    ]
    assert tables.compared(rows).splitlines() == [
        "Worker-hours (deadlines missed)",
        "pattern   jobs  bound          a    b",
        "p        1,200    1.2  1,234 (3)  2.2",
        "",
        "Mean seconds from arrival to end",
        "pattern   jobs  all there   a   b",
        "p        1,200        3.0  44  44",
    ]


def test_short_helps_are_whole() -> None:
    text = CliRunner().invoke(scale_sim.main, ["--help"]).output
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "--startup", "nan"],
        ["compare", "--startup", "inf"],
        ["compare", "--startup", "-5"],
        ["compare", "--most", "0"],
        ["compare", "--seed", "-1"],
        ["large", "--workers", "0"],
        ["choose", "--seed", "3"],
    ],
)
def test_what_cannot_be_simulated_is_refused_and_not_begun(arguments: list[str]) -> None:
    result = CliRunner().invoke(scale_sim.main, arguments)
    assert result.exit_code == 2, result.output
