"""The manifests, as they are written and as each overlay builds them."""

import copy
import re
import tomllib
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from pydantic import ValidationError

from jobs import cli
from jobs.settings import Settings
from tests.unit.infra import keda, manifests
from tests.unit.infra.manifests import Object
from worker import celery

VERSION = "1.37"
WORKER = "longhaul-worker"
SECRETS = {"longhaul", "longhaul-keda"}


@pytest.fixture(params=["as written", *manifests.OVERLAYS])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    if request.param == "as written":
        return manifests.written()
    return manifests.built(request.param)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [made for made in objects if made["kind"] in kinds]


def settings(objects: list[Object]) -> dict[str, str]:
    (found,) = of_kind(objects, "ConfigMap")
    data: dict[str, str] = found["data"]
    return data


def test_every_object_fits_its_schema(objects: list[Object]) -> None:
    for made in objects:
        if made["apiVersion"].startswith("keda.sh/"):
            keda.ADAPTER.validate_python(made)
        else:
            kubernetes_validate.validate(made, VERSION, strict=True)


def test_pods_of_jobs_fit_the_schema(objects: list[Object]) -> None:
    for made in of_kind(objects, "ScaledJob"):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": made["metadata"]}
        kubernetes_validate.validate(job | {"spec": made["spec"]["jobTargetRef"]}, VERSION, strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("ScaledObject", ("spec", "coolDownPeriod"), 300),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "listLength"), 64),
        ("ScaledObject", ("spec", "triggers", 0, "metadata", "listLength"), "0"),
        ("ScaledJob", ("spec", "scalingStrategy", "strategy"), "gradual"),
        ("TriggerAuthentication", ("spec", "secretTargetRef", 0, "parameter"), "host"),
    ],
)
def test_keda_objects_with_a_mistake_are_noticed(kind: str, path: tuple[Any, ...], value: object) -> None:
    broken = copy.deepcopy(of_kind(manifests.written(), kind)[0])
    place = broken
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(ValidationError):
        keda.ADAPTER.validate_python(broken)


def test_kustomizations_build_what_they_promise() -> None:
    workers = {
        overlay: {
            made["kind"] for made in manifests.built(overlay) if made["metadata"]["name"] == "longhaul-worker"
        }
        for overlay in manifests.OVERLAYS
    }
    kept = {"Deployment", "ScaledObject", "PodDisruptionBudget", "NetworkPolicy"}
    assert workers["base"] == workers["overlays/gpu"] == kept
    # A budget cannot count Jobs: with one, no node could be drained.
    assert workers["overlays/gpu-jobs"] == {"ScaledJob", "NetworkPolicy"}


def test_pods_have_no_rights_they_do_not_need(objects: list[Object]) -> None:
    found = list(manifests.pods(objects))
    assert {component for component, _ in found} == {"api", "worker"}
    for _, template in found:
        spec = template["spec"]
        security, (container,) = spec["securityContext"], spec["containers"]
        assert security["runAsNonRoot"] is True
        assert (security["runAsUser"], security["runAsGroup"]) == (10001, 10001)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}


def test_no_service_becomes_a_setting(objects: list[Object]) -> None:
    """With links, a Service longhaul-x is a variable LONGHAUL_X_PORT in each pod, and that is no setting."""
    links = [template["spec"].get("enableServiceLinks", True) for _, template in manifests.pods(objects)]
    assert links
    assert not any(links)


def test_what_is_written_to_is_mounted(objects: list[Object]) -> None:
    for component, template in manifests.pods(objects):
        (container,) = template["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"]}
        wanted = {"/tmp"} if component == "api" else {"/tmp", "/var/cache/longhaul", "/dev/shm"}
        assert mounts.keys() == wanted
        assert volumes.keys() == set(mounts.values())
        assert component == "api" or volumes[mounts["/dev/shm"]]["medium"] == "Memory"


def test_workers_get_the_time_they_drain_for(objects: list[Object]) -> None:
    drain = float(settings(objects)["LONGHAUL_DRAIN_SECONDS"])
    for component, template in manifests.pods(objects):
        if component == "worker":
            assert template["spec"]["terminationGracePeriodSeconds"] >= drain + 15


def test_settings_are_taken(objects: list[Object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in settings(objects).items():
        monkeypatch.setenv(name, value)
    assert Settings.load().served == ("smol",)


def test_scalers_follow_the_hashes_of_the_ledger(
    objects: list[Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings(objects).items():
        monkeypatch.setenv(name, value)
    keys = CliRunner().invoke(cli.main, ["queue-keys"]).stdout.split()
    assert len(keys) == 2
    for made in of_kind(objects, "ScaledObject", "ScaledJob"):
        assert {t["metadata"]["listName"] for t in made["spec"]["triggers"]} == set(keys)


def test_scalers_go_to_zero_and_wake_at_one(objects: list[Object]) -> None:
    scalers = of_kind(objects, "ScaledObject", "ScaledJob")
    assert scalers
    for made in scalers:
        assert made["spec"].get("minReplicaCount", 0) == 0
        assert {t["metadata"]["activationListLength"] for t in made["spec"]["triggers"]} == {"0"}


def test_what_is_referred_to_exists(objects: list[Object]) -> None:
    names = {(made["kind"], made["metadata"]["name"]) for made in objects}
    for made in of_kind(objects, "ScaledObject", "ScaledJob"):
        for trigger in made["spec"]["triggers"]:
            assert ("TriggerAuthentication", trigger["authenticationRef"]["name"]) in names
    for made in of_kind(objects, "ScaledObject"):
        assert ("Deployment", made["spec"]["scaleTargetRef"]["name"]) in names
    for _, template in manifests.pods(objects):
        for source in template["spec"]["containers"][0]["envFrom"]:
            ((kind, reference),) = source.items()
            assert kind == "secretRef" or ("ConfigMap", reference["name"]) in names
            assert kind == "configMapRef" or reference["name"] in SECRETS


def test_selectors_find_pods(objects: list[Object]) -> None:
    labels = [template["metadata"]["labels"] for _, template in manifests.pods(objects)]
    for made in of_kind(objects, "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        selector = made["spec"].get("selector") or made["spec"]["podSelector"]
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= found.items() for found in labels), made["metadata"]["name"]


def test_secrets_are_made_by_the_readmes_commands_alone(objects: list[Object]) -> None:
    assert of_kind(objects, "Secret") == []
    readme = (manifests.INFRA / "README.md").read_text()
    assert set(re.findall(r"kubectl create secret generic (\S+)", readme)) == SECRETS
    for made in of_kind(objects, "TriggerAuthentication"):
        for one in made["spec"]["secretTargetRef"]:
            assert one["name"] == "longhaul-keda"
            assert f"{one['key']}=" in readme


def test_images_are_those_of_the_dockerfile(objects: list[Object]) -> None:
    version = tomllib.loads((manifests.ROOT / "pyproject.toml").read_text())["project"]["version"]
    stages = manifests.stages()
    for _, template in manifests.pods(objects):
        name, _, tag = template["spec"]["containers"][0]["image"].partition(":")
        assert name.removeprefix("longhaul-") in stages
        assert tag == version


def test_the_readme_names_files_that_exist() -> None:
    readme = (manifests.INFRA / "README.md").read_text()
    named = set(re.findall(r"(?:k8s/)?((?:base|overlays)/[\w./-]*\w)", readme))
    assert len(named) >= 4
    assert {name for name in named if not (manifests.K8S / name).exists()} == set()


def test_workers_serve_metrics_where_they_may_be_asked(objects: list[Object]) -> None:
    data = settings(objects)
    assert data["LONGHAUL_METRICS_HOST"] == "0.0.0.0"
    wanted = {"name": "metrics", "containerPort": int(data["LONGHAUL_METRICS_PORT"])}
    found = [
        t["spec"]["containers"][0]["ports"]
        for component, t in manifests.pods(objects)
        if component == "worker"
    ]
    assert all(ports == [wanted] for ports in found)
    (policy,) = [made for made in of_kind(objects, "NetworkPolicy") if made["metadata"]["name"] == WORKER]
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "metrics"}]}]


def test_jobs_start_a_worker_that_ends_when_it_is_idle(objects: list[Object]) -> None:
    for made in of_kind(objects, "ScaledJob"):
        arguments = made["spec"]["jobTargetRef"]["template"]["spec"]["containers"][0]["args"]
        assert arguments[:4] == ["celery", "-A", "worker", "worker"]
        place = arguments.index("--exit-when-idle")
        (option,) = [o for o in celery.app.user_options["worker"] if "--exit-when-idle" in o.opts]
        assert option.type.convert(arguments[place + 1], None, None) > 0


def test_the_example_keeps_both_triggers_and_their_authentication(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that is merged would replace the list, and no job would ever be planned."""
    example, below = manifests.built(manifests.EXAMPLE), manifests.built("overlays/gpu")
    for name, value in settings(example).items():
        monkeypatch.setenv(name, value)
    keys = CliRunner().invoke(cli.main, ["queue-keys"]).stdout.split()
    (scaler,), (other,) = (of_kind(made, "ScaledObject") for made in (example, below))
    assert {t["metadata"]["listName"] for t in scaler["spec"]["triggers"]} == set(keys)
    assert [t["authenticationRef"] for t in scaler["spec"]["triggers"]] == [
        t["authenticationRef"] for t in other["spec"]["triggers"]
    ]
    length = scaler["spec"]["triggers"][0]["metadata"]["listLength"]
    assert int(length) * scaler["spec"]["maxReplicaCount"] == 128
    keda.ADAPTER.validate_python(scaler)


def test_the_example_changes_every_image_the_model_and_nothing_it_does_not_name() -> None:
    example, below = manifests.built(manifests.EXAMPLE), manifests.built("overlays/gpu")
    images = [template["spec"]["containers"][0]["image"] for _, template in manifests.pods(example)]
    own = [template["spec"]["containers"][0]["image"] for _, template in manifests.pods(below)]
    assert images == [f"registry.example.com/{image}" for image in own]
    assert [made["metadata"]["name"] for made in example] == [made["metadata"]["name"] for made in below]
    now, before = settings(example), settings(below)
    changed = {name for name in now if now[name] != before.get(name)}
    assert now.keys() == before.keys()
    assert changed == {"LONGHAUL_STORE_URL", "LONGHAUL_MODELS"}


def test_monitors_ask_ports_that_pods_have_under_the_names_that_alerts_know() -> None:
    folder = manifests.INFRA / "prometheus"
    scraped = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"]
    monitors = list(yaml.safe_load_all((folder / "podmonitors.yaml").read_text()))
    jobs = set()
    for made in monitors:
        (endpoint,), wanted = made["spec"]["podMetricsEndpoints"], made["spec"]["selector"]["matchLabels"]
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        jobs.add(relabeling["replacement"])
        found = [
            template
            for _, template in manifests.pods(manifests.written())
            if wanted.items() <= template["metadata"]["labels"].items()
        ]
        assert found
        for template in found:
            ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            assert endpoint["port"] in ports
    assert jobs == {one["job_name"] for one in scraped}
