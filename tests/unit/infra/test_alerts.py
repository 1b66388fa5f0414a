"""Each alert goes off at what it is for, and at nothing that is in order."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.unit.infra.test_metric_names import rules

SCENES = Path(__file__).with_name("alerts_test.yaml")


def test_each_alert_has_a_scene_at_which_it_goes_off() -> None:
    tests = [one for scene in yaml.safe_load(SCENES.read_text())["tests"] for one in scene["alert_rule_test"]]
    assert {one["alertname"] for one in tests if one["exp_alerts"]} == {rule["alert"] for rule in rules()}


def test_alerts_go_off_when_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool (of Prometheus) is not on PATH")
    done = subprocess.run([promtool, "test", "rules", SCENES], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
