"""Histograms and tables of metrics say what was counted."""

import dataclasses
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jobs.metrics import families, histogram
from worker.engine import Stats
from worker.metrics import counters

FAMILY = families.Family("x_seconds", "histogram", "x")


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return all samples as Prometheus reads them, with the values of their labels, `le` last; none twice."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            labels = sorted(sample.labels.items(), key=lambda label: label[0] == "le")
            key = (sample.name, tuple(value for _, value in labels))
            assert key not in found
            found[key] = sample.value
    return found


def test_a_value_on_a_bound_counts_below_it_and_buckets_add_up() -> None:
    registry = CollectorRegistry()
    one = histogram.Histogram(FAMILY, (0.5, 1, 2.5))
    registry.register(one)
    one.observe(("m",), [0.5, 0.6, 3.0])
    one.observe(("m",), [0.1])
    found = samples(registry)
    buckets = {labels[1]: value for (name, labels), value in found.items() if name.endswith("_bucket")}
    assert buckets == {"0.5": 2, "1.0": 3, "2.5": 3, "+Inf": 4}
    assert found["longhaul_x_seconds_sum", ("m",)] == pytest.approx(4.2)
    assert found["longhaul_x_seconds_count", ("m",)] == 4


def test_every_field_of_an_engines_stats_is_a_metric() -> None:
    """A counter that somebody adds is shown to operators, too."""
    used = {*counters.COUNTERS, *counters.FALLBACKS.values(), "step_seconds", "scheduling_seconds"}
    used |= {"embedding_seconds", "kv_bytes_budget"}
    used |= {f"requests_{event}" for event in ("added", "finished", "cancelled", "failed")}
    assert used == {field.name for field in dataclasses.fields(Stats)}


def of(**stats: float) -> dict[str, list[tuple[dict[str, str], float]]]:
    found = counters.of("m", dataclasses.asdict(Stats()) | stats, {})
    return {family.name: [(sample.labels, sample.value) for sample in family.samples] for family in found}


def test_what_an_engine_cannot_know_is_absent_and_not_zero() -> None:
    assert not of().keys() & {"longhaul_padding_ratio", "longhaul_kv_usage_ratio", "longhaul_step_seconds"}


def test_totals_of_a_model_that_is_not_loaded_stay_and_its_gauges_go() -> None:
    """A turn may begin and end between two scrapes."""
    past = dataclasses.asdict(Stats()) | {"tokens_sampled": 5, "kv_bytes_in_use": 7, "steps": 1}
    for stats, models in ((None, ["a"]), (dataclasses.asdict(Stats()), ["a", "b"])):
        found = {one.name: one.samples for one in counters.of("b", stats, {"a": past})}
        assert len(found) == len(list(counters.of("b", stats, {"a": past}))), "a metric is told once"
        told = {sample.labels["model"]: sample.value for sample in found["longhaul_generation_tokens"]}
        assert told == dict.fromkeys(models, 0) | {"a": 5}
        assert {s.labels["model"] for s in found["longhaul_step_seconds"]} == {"a"}
        shown = {s.labels["model"] for s in found.get("longhaul_kv_bytes_in_use", ())}
        assert shown == {*models} - {"a"}


def test_ratios_and_phases_of_an_engine() -> None:
    found = of(
        padding_tokens=25,
        prefill_tokens_computed=75,
        kv_bytes_in_use=1,
        kv_bytes_budget=4,
        steps=2,
        step_seconds=3.0,
        scheduling_seconds=1.0,
    )
    assert found["longhaul_padding_ratio"] == [({"model": "m"}, 0.25)]
    assert found["longhaul_kv_usage_ratio"] == [({"model": "m"}, 0.25)]
    sums = dict(zip(("model", "scheduling"), found["longhaul_step_seconds"][1::2], strict=True))
    assert {phase: (labels["phase"], value) for phase, (labels, value) in sums.items()} == {
        "model": ("model", 2.0),
        "scheduling": ("scheduling", 1.0),
    }


def test_the_page_says_what_the_engine_calls_a_metric_of_another_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    told = dict(re.findall(r"^\| `longhaul_(\w+)` \| `(\w+)` \|$", page, re.MULTILINE))
    names = {family.name.removeprefix("longhaul_"): field for field, family in counters.COUNTERS.items()}
    assert told == {name: field for name, field in names.items() if name.removesuffix("_total") != field}
