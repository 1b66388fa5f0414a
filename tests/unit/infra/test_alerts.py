"""Each alert goes off at what it is for, and at nothing that is in order."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
import pytest
import yaml

from api import status
from tests.unit.infra import declared
from tests.unit.infra.test_metric_names import expressions, nodes, rules

SCENES = Path(__file__).with_name("alerts_test.yaml")


def named_values() -> Iterator[tuple[str, str, str]]:
    """Yield (metric, label, value) of all that alerts and panels choose series by."""
    for _, text in expressions():
        for node in nodes(promql.parse(text)):
            if isinstance(node, promql.VectorSelector) and node.name.startswith(declared.PREFIX):
                for one in node.matchers.matchers:
                    yield from ((node.name, one.name, value) for value in one.value.split("|"))


def test_values_that_series_are_chosen_by_exist() -> None:
    """What is said of a metric names all values of its labels; those of these three come from elsewhere."""
    found = {each for each in named_values() if each[1] != "model"}
    assert {label for _, label, _ in found} == {"state", "reason", "kind", "outcome", "status", "route"}
    routes = {getattr(route, "path", None) for route in status.router.routes}
    for name, label, value in found:
        if label == "route":
            assert value in routes
        elif label == "status":
            assert value == "5.."
        else:
            words = re.findall(r"[a-z_]+", declared.family_of(name).help)
            assert value in words, (name, label, value)


def test_prometheus_takes_what_is_not_promql() -> None:
    for rule in rules():
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s")), rule["alert"]
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        for text in rule["annotations"].values():
            functions = set(re.findall(r"{{ \$value \| (\w+) }}", text))
            assert functions <= {"humanize", "humanizePercentage", "humanizeDuration"}


def test_each_alert_has_a_scene_at_which_it_goes_off() -> None:
    tests = [one for scene in yaml.safe_load(SCENES.read_text())["tests"] for one in scene["alert_rule_test"]]
    assert {one["alertname"] for one in tests if one["exp_alerts"]} == {rule["alert"] for rule in rules()}


def test_alerts_go_off_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not on PATH")
    done = subprocess.run([promtool, "test", "rules", SCENES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
