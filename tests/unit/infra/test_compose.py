"""The compose files: everything on one machine."""

import json
import re
from pathlib import Path

import compose_spec
import pytest

from jobs import cli
from tests.unit.infra import manifests
from tests.unit.infra.manifests import Object

SERVICES: dict[str, Object] = manifests.compose()["services"]
TEXT = "\n".join(file.read_text() for file in manifests.COMPOSE)
EXAMPLE = (manifests.INFRA / "env.example").read_text()


@pytest.mark.parametrize("file", manifests.COMPOSE, ids=lambda file: file.name)
def test_file_fits_the_specification(file: Path) -> None:
    compose_spec.PyCompose.from_json(json.dumps(manifests.compose(file))).validate()


def test_a_mistake_in_a_file_is_noticed() -> None:
    broken = manifests.compose()
    broken["services"]["api"]["restart"] = "sometimes"
    with pytest.raises(ValueError, match="sometimes"):
        compose_spec.PyCompose.from_json(json.dumps(broken))


def test_everything_that_deploys_is_there() -> None:
    assert {"redis", "store", "api", "worker", "autoscale", "prometheus", "grafana"} <= SERVICES.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_service_starts_again_and_has_no_rights_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def ours() -> dict[str, Object]:
    """The services whose images the Dockerfile makes."""
    return {name: service for name, service in SERVICES.items() if "build" in service}


def test_images_of_ours_are_stages_that_check_themselves() -> None:
    stages = manifests.stages()
    for name, service in ours().items():
        target = service["build"]["target"]
        assert service["image"] == f"longhaul-{target}"
        checked = any(line.startswith("HEALTHCHECK") for line in stages[target])
        # That of a worker asks the first process, which is the autoscaler here.
        assert service.get("healthcheck") == ({"disable": True} if name == "autoscale" else None)
        assert checked


def test_other_images_are_checked_and_pinned() -> None:
    for name in SERVICES.keys() - ours().keys():
        assert SERVICES[name]["healthcheck"]["test"]
        assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", SERVICES[name]["image"])


def test_gpu_workers_have_the_image_for_it() -> None:
    over = manifests.compose(manifests.COMPOSE[1])["services"]
    assert over.keys() == {"autoscale", "worker"}
    for service in over.values():
        assert (service["image"], service["build"]["target"]) == ("longhaul-worker", "worker")
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device["capabilities"] == ["gpu"]


def test_workers_get_the_time_they_drain_for() -> None:
    for name in ("worker", "autoscale"):
        drain = float(SERVICES[name]["environment"].get("LONGHAUL_DRAIN_SECONDS", 25))
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= drain + 15


def test_volumes_are_declared_and_used() -> None:
    used = {
        place.split(":")[0]
        for service in SERVICES.values()
        for place in service.get("volumes", [])
        if not place.startswith(".")
    }
    assert used == set(manifests.compose()["volumes"])


def test_variables_are_in_the_example() -> None:
    used = set(re.findall(r"(?<!\$)\$\{(\w+)", TEXT))
    offered = set(re.findall(r"^(?:# )?([A-Z][A-Z0-9_]+)=", EXAMPLE, re.MULTILINE))
    assert used == offered - {"COMPOSE_PROFILES", "COMPOSE_FILE"}


def test_no_secret_has_a_value() -> None:
    secret = r"^(\w*(?:PASSWORD|SECRET|ACCESS_KEY_ID)\w*)=(.*)$"
    assert {value for _, value in re.findall(secret, EXAMPLE, re.MULTILINE)} == {""}
    given = re.findall(r"^\s+(\w*(?:PASSWORD|SECRET|ACCESS_KEY)\w*): (.*)$", TEXT, re.MULTILINE)
    assert len(given) >= 6
    assert all(re.fullmatch(r"\$\{\w+:\?see env\.example\}", value) for _, value in given)
    assert "/infra/.env" in (manifests.ROOT / ".gitignore").read_text().split()


def test_profiles_of_the_example_exist() -> None:
    (chosen,) = re.findall(r"^COMPOSE_PROFILES=(.*)$", EXAMPLE, re.MULTILINE)
    assert set(chosen.split(",")) <= {p for service in SERVICES.values() for p in service.get("profiles", [])}


@pytest.mark.parametrize("file", manifests.COMPOSE, ids=lambda file: file.name)
def test_the_autoscalers_command_is_one_that_longhaul_takes(file: Path) -> None:
    text = manifests.compose(file)["services"]["autoscale"]["command"]
    name, command, *arguments = [re.sub(r"\$\{\w+:-(\w+)\}", r"\1", one) for one in text]
    assert name == "longhaul"
    assert cli.main.commands[command].make_context(command, arguments).params["least"] == 0


def test_what_is_mounted_from_here_exists() -> None:
    places = [
        place for service in SERVICES.values() for place in service.get("volumes", []) if place[0] == "."
    ]
    assert len(places) >= 3
    assert all((manifests.INFRA / place.split(":")[0]).is_dir() for place in places)
    assert (manifests.INFRA / "prometheus" / "prometheus.yaml").is_file()


def test_prometheus_asks_services_that_exist() -> None:
    text = (manifests.INFRA / "prometheus" / "prometheus.yaml").read_text()
    named = {name for names in re.findall(r"names: \[([^]]*)\]", text) for name in names.split(", ")}
    assert named
    assert named <= SERVICES.keys()
