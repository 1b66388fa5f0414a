"""What dashboards and alerts ask for is there, and what the page lists is all there is."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, ProcessCollector

from tests.unit.infra import declared

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
DASHBOARD = json.loads((INFRA / "grafana" / "longhaul.json").read_text())
ALERTS = yaml.safe_load((INFRA / "prometheus" / "alerts.yaml").read_text())
SCRAPES = yaml.safe_load((INFRA / "prometheus" / "prometheus.yaml").read_text())
OF_PROMETHEUS = {"job", "instance"}
"""Labels that a scrape adds."""


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    """Return (where, PromQL) of everything, Grafana's variables filled in."""
    found = [(rule["alert"], rule["expr"]) for rule in rules()]
    for panel in panels():
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "5m").replace("$model", "smol")
            found.append((f"{panel['title']} {target['refId']}", text))
    return found


def nodes(node: Any) -> Iterator[Any]:
    """Yield an expression and all that it is made of."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        inner = getattr(node, name, None)
        if inner is not None and not isinstance(inner, str):
            yield from nodes(inner)
    for argument in getattr(node, "args", None) or ():
        yield from nodes(argument)


def known() -> dict[str, set[str]]:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    process = {sample.name: set(sample.labels) for one in registry.collect() for sample in one.samples}
    return declared.series() | process | {"up": set()}


KNOWN = known()


def problems(text: str) -> list[str]:
    """Return what an expression asks for that does not exist."""
    whole = list(nodes(promql.parse(text)))
    selectors = [node for node in whole if isinstance(node, promql.VectorSelector)]
    assert selectors
    found, labels = [], set(OF_PROMETHEUS)
    for selector in selectors:
        if selector.name not in KNOWN:
            found.append(f"metric {selector.name}")
            continue
        mine = KNOWN[selector.name] | OF_PROMETHEUS
        labels |= mine
        found += [
            f"label {one.name} of {selector.name}"
            for one in selector.matchers.matchers
            if one.name not in mine
        ]
    for node in whole:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found += [f"label {name}" for name in node.modifier.labels if name not in labels]
    return found


@pytest.mark.parametrize(("where", "text"), expressions())
def test_what_is_asked_for_is_a_metric_of_the_code_with_these_labels(where: str, text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rate(longhaul_prefil_tokens_total[5m])", "metric longhaul_prefil_tokens_total"),
        ("max(sum by (bucket) (longhaul_requests_leased))", "label bucket"),
        ('1 + longhaul_requests_leased{bucket="128"}', "label bucket of longhaul_requests_leased"),
        ("histogram_quantile(0.9, longhaul_queue_seconds)", "metric longhaul_queue_seconds"),
    ],
)
def test_what_is_not_there_is_found(text: str, problem: str) -> None:
    assert problem in problems(text)


def test_panels_have_ids_of_their_own_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids) > 30
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_every_panel_asks_the_data_source_that_the_reader_chose() -> None:
    assert [one["name"] for one in DASHBOARD["templating"]["list"] if one["type"] == "datasource"] == [
        "datasource"
    ]
    for panel in panels():
        if panel["type"] == "row":
            continue
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_legends_and_alerts_name_labels_that_the_answer_has() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            left = labels_left(promql.parse(target["expr"].replace("$__rate_interval", "5m")))
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= left, (panel["title"], target["legendFormat"])
    for rule in rules():
        texts = " ".join(rule["annotations"].values())
        assert set(re.findall(r"\$labels\.(\w+)", texts)) <= labels_left(promql.parse(rule["expr"])), rule[
            "alert"
        ]


def labels_left(node: Any) -> set[str]:
    """Return the labels of what an expression gives."""
    if isinstance(node, promql.AggregateExpr):
        return set(node.modifier.labels) if node.modifier else set()
    if isinstance(node, promql.VectorSelector):
        return KNOWN[node.name] | OF_PROMETHEUS
    if isinstance(node, promql.Call):
        (inner,) = [labels_left(each) for each in node.args if not isinstance(each, promql.NumberLiteral)]
        return inner - ({"le"} if node.func.name == "histogram_quantile" else set())
    if isinstance(node, promql.BinaryExpr):
        return labels_left(node.rhs if isinstance(node.lhs, promql.NumberLiteral) else node.lhs)
    inner_node = getattr(node, "vector_selector", None) or node.expr
    return labels_left(inner_node)


def test_alerts_are_named_once_and_say_what_is_wrong_and_how_bad_it_is() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["alert"].startswith("Longhaul")
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].endswith(".")


def test_jobs_that_alerts_and_panels_name_are_scraped() -> None:
    scraped = {job["job_name"] for job in SCRAPES["scrape_configs"]}
    text = "".join(text for _, text in expressions())
    named = re.findall(r'\bjob="([^"]+)"', text)
    assert named
    assert set(named) <= scraped == {"longhaul-api", "longhaul-worker"}
    assert SCRAPES["rule_files"] == ["alerts.yaml"]


def test_the_page_lists_every_metric_with_its_kind_and_its_labels() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(longhaul_\w+)` \| (\w+) \| (.*?) \| .+ \|$", page, re.MULTILINE)
    listed = {name: (kind, re.findall(r"`(\w+)`", labels)) for name, kind, labels in rows}
    assert len(listed) == len(rows)
    assert listed == {one.full_name: (one.kind, list(one.labels)) for one in declared.FAMILIES}
