"""What the files say of ports, paths and names fits together, and fits what the programs do."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from api import status
from jobs.settings import Settings
from tests.unit.infra import manifests
from tests.unit.infra.manifests import Object

SERVICES: dict[str, Object] = manifests.compose()["services"]
STAGES = manifests.stages()
PROBES = {route.path for route in status.router.routes if hasattr(route, "path")}
API_PORT = 8000
METRICS_PORT = Settings.model_fields["metrics_port"].default
PUBLISHED = {"api": API_PORT, "prometheus": 9090, "grafana": 3000}


def line_of(stage: str, instruction: str) -> str:
    """Return what the last such instruction of a stage says."""
    return [text.partition(" ")[2] for text in STAGES[stage] if text.startswith(f"{instruction} ")][-1]


def command(stage: str) -> list[str]:
    found: list[str] = json.loads(line_of(stage, "CMD"))
    return found


def option(words: list[str], name: str) -> str:
    """Return the value of --name=value or -name=value."""
    (found,) = [word.partition("=")[2] for word in words if word.lstrip("-").startswith(f"{name}=")]
    return found


def mounts(service: Object) -> dict[str, str]:
    """Return path -> volume, '' for memory."""
    volumes = (place.split(":")[:2] for place in service.get("volumes", []))
    return {path: source for source, path in volumes} | dict.fromkeys(service.get("tmpfs", []), "")


def variables(stage: str) -> dict[str, str]:
    pairs = (
        pair.partition("=") for text in STAGES[stage] if text.startswith("ENV ") for pair in text.split()
    )
    return {name: value for name, equals, value in pairs if equals}


def test_the_api_listens_where_it_is_published_probed_and_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (manifests.ROOT / "api" / "__main__.py").read_text()
    assert f'"--port", type=int, default={API_PORT}' in source
    assert line_of("api", "EXPOSE") == str(API_PORT)
    assert command("api")[-2:] == ["--host", "0.0.0.0"]
    check = line_of("api", "HEALTHCHECK")
    assert f"http://127.0.0.1:{API_PORT}/healthz'" in check
    assert "/healthz" in PROBES


def test_ports_that_are_published_are_those_that_programs_listen_at() -> None:
    found = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert found == {name: [f"127.0.0.1:{port}:{port}"] for name, port in PUBLISHED.items()}
    for name in ("prometheus", "grafana"):
        assert f"http://127.0.0.1:{PUBLISHED[name]}/" in SERVICES[name]["healthcheck"]["test"][-1]
    readme = (manifests.INFRA / "README.md").read_text()
    assert all(re.search(rf"\b{port}\b", readme) for port in PUBLISHED.values())


def test_the_store_is_where_the_others_look_for_it() -> None:
    store, environment = command("store"), SERVICES["api"]["environment"]
    port = option(store, "s3.port")
    assert option(store, "ip.bind") == "0.0.0.0"
    assert line_of("store", "EXPOSE") == port
    assert f"http://127.0.0.1:{port}/healthz" in line_of("store", "HEALTHCHECK")
    assert environment["LONGHAUL_S3_ENDPOINT_URL"] == f"http://store:{port}"
    assert environment["LONGHAUL_STORE_URL"] == f"s3://{option(store, 'bucket')}"
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        given = {SERVICES["store"]["environment"][f"AWS_{name}"], environment[f"LONGHAUL_S3_{name}"]}
        assert given == {f"${{S3_{name}:?see env.example}}"}


def test_redis_keeps_its_data_in_a_volume_without_root() -> None:
    redis = SERVICES["redis"]
    (script,) = redis["command"]
    assert redis["user"] == "redis"
    assert mounts(redis)[re.findall(r"--dir (\S+)", script)[0]] == "redis"
    assert {"--appendonly yes", "--maxmemory-policy noeviction"} <= set(re.findall(r"--\S+ \S+", script))
    assert "requirepass $$REDIS_PASSWORD" in script
    assert redis["environment"]["REDIS_PASSWORD"] in SERVICES["api"]["environment"]["LONGHAUL_REDIS_URL"]


def test_what_services_write_is_mounted_and_what_is_to_stay_is_a_volume() -> None:
    assert mounts(SERVICES["store"])[option(command("store"), "dir")] == "store"
    assert line_of("store", "VOLUME") == option(command("store"), "dir")
    prometheus = SERVICES["prometheus"]
    assert mounts(prometheus)[option(prometheus["command"], "storage.tsdb.path")] == "prometheus"
    assert mounts(SERVICES["grafana"])["/var/lib/grafana"] == "grafana"
    assert mounts(SERVICES["api"]) == {"/tmp": ""}
    for name in ("worker", "autoscale"):
        assert mounts(SERVICES[name]) == {"/tmp": "scratch", "/var/cache/longhaul": "cache"}
        assert SERVICES[name]["shm_size"] == "1gb"
    for name in ("redis", "store", "grafana"):
        assert "/tmp" in mounts(SERVICES[name])


@pytest.mark.parametrize("file", manifests.COMPOSE, ids=lambda file: file.name)
def test_the_autoscaler_writes_where_it_may_and_reaps_what_it_starts(file: Any) -> None:
    words = manifests.compose(file)["services"]["autoscale"]["command"]
    assert option(words, "logs").startswith("/tmp/")
    assert SERVICES["autoscale"]["init"] is True
    slots = {word.partition("=")[0] for word in words} & {"--cpus", "--gpus"}
    assert slots == {"--gpus" if "gpu" in file.name else "--cpus"}


def test_nobody_starts_before_redis_and_store_are_well() -> None:
    for name in ("api", "worker", "autoscale"):
        wanted = {"redis": {"condition": "service_healthy"}, "store": {"condition": "service_healthy"}}
        assert SERVICES[name]["depends_on"] == wanted


def test_one_kind_of_workers_runs_at_a_time() -> None:
    example = (manifests.INFRA / "env.example").read_text()
    (chosen,) = re.findall(r"^COMPOSE_PROFILES=(.*)$", example, re.MULTILINE)
    assert sorted(chosen.split(",")) == ["autoscale", "monitoring"]


def test_prometheus_asks_where_metrics_are_served() -> None:
    file = yaml.safe_load((manifests.INFRA / "prometheus" / "prometheus.yaml").read_text())
    asked: dict[str, list[int]] = {}
    for job in file["scrape_configs"]:
        assert job.get("metrics_path", "/metrics") in PROBES
        for found in job["dns_sd_configs"]:
            for name in found["names"]:
                assert found["type"] == "A"
                asked.setdefault(name, []).append(found["port"])
    several = list(range(METRICS_PORT, METRICS_PORT + 8))
    assert asked == {"api": [API_PORT], "worker": [METRICS_PORT], "autoscale": several}
    environment = SERVICES["worker"]["environment"]
    assert environment["LONGHAUL_METRICS_HOST"] == "0.0.0.0"
    assert "LONGHAUL_METRICS_PORT" not in environment
    assert set(file) == {"global", "rule_files", "scrape_configs"}
    assert set(file["global"]) == {"scrape_interval", "evaluation_interval"}


def test_prometheus_and_grafana_find_their_files_and_each_other() -> None:
    prometheus, grafana = SERVICES["prometheus"], SERVICES["grafana"]
    folder, _, name = option(prometheus["command"], "config.file").rpartition("/")
    assert (manifests.INFRA / mounts(prometheus).copy().get(folder, "nowhere") / name).is_file()
    provisioning = manifests.INFRA / "grafana" / "provisioning"
    assert mounts(grafana)["/etc/grafana/provisioning"] == "./grafana/provisioning"
    boards = yaml.safe_load((provisioning / "dashboards" / "longhaul.yaml").read_text())
    assert [mounts(grafana)[one["options"]["path"]] for one in boards["providers"]] == ["./grafana"]
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == f"http://prometheus:{PUBLISHED['prometheus']}"
    assert (source["type"], source["uid"], source["isDefault"]) == ("prometheus", "prometheus", True)


@pytest.mark.parametrize("image", ["worker-cpu", "worker"])
def test_a_worker_keeps_what_it_makes_in_the_cache_and_has_a_compiler(image: str) -> None:
    folders = {name: path for name, path in variables(image).items() if re.search(r"CACHE|HF_HOME", name)}
    assert folders.keys() >= {"XDG_CACHE_HOME", "HF_HOME"}
    assert all(f"{path}/".startswith("/var/cache/longhaul/") for path in folders.values())
    assert any("apt-get install" in text and " g++ " in text for text in STAGES[image])
    # The name that Celery gives the first process of a container.
    assert "inspect ping" in line_of(image, "HEALTHCHECK")
    assert line_of(image, "HEALTHCHECK").endswith('--destination celery-1@$(hostname)"]')


@pytest.mark.parametrize(
    ("image", "extras"), [("api", "otel"), ("worker-cpu", "worker otel"), ("worker", "worker gpu otel")]
)
def test_an_image_has_what_its_own_build_installed(image: str, extras: str) -> None:
    build = f"build-{image}"
    copies = [text.split()[1:] for text in STAGES[image] if text.startswith("COPY ")]
    assert copies == [[f"--from={build}", "/opt/longhaul", "/opt/longhaul"]]
    installed = re.findall(r"infra/requirements\.py ([\w ]+) >", "\n".join(STAGES[build]))
    assert installed[-1] == extras
    copied = {source for text in STAGES[build] if text.startswith("COPY ") for source in text.split()[1:-1]}
    assert copied >= {"api", "jobs", "worker", "pyproject.toml", "constraints.txt"}


def test_cuda_is_the_same_where_things_are_built_and_where_they_run() -> None:
    versions = {
        re.findall(r"nvidia/cuda:([\d.]+)-", text[0])[0] for text in STAGES.values() if "cuda:" in text[0]
    }
    assert len(versions) == 1


@pytest.fixture(params=["as written", *manifests.OVERLAYS])
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return manifests.written() if request.param == "as written" else manifests.built(request.param)


def named(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [made for made in objects if (made["kind"], made["metadata"]["name"]) == (kind, name)]
    return found


def workers(objects: list[Object]) -> Iterator[Object]:
    return (template["spec"] for component, template in manifests.pods(objects) if component == "worker")


def test_kubernetes_probes_and_reaches_the_api_where_it_listens(objects: list[Object]) -> None:
    deployment = named(objects, "Deployment", "longhaul-api")["spec"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": API_PORT}]
    # A Redis that is away is no reason to end the process: only whether it is ready depends on it.
    wanted = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    for probe, path in wanted.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        assert path in PROBES
    (port,) = named(objects, "Service", "longhaul-api")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (80, "http")
    ingress = named(objects, "NetworkPolicy", "longhaul-api")["spec"]["ingress"]
    assert ingress == [{"ports": [{"port": "http"}]}]
    assert (
        named(objects, "PodDisruptionBudget", "longhaul-api")["spec"]["minAvailable"] < deployment["replicas"]
    )
    assert deployment["template"]["spec"]["terminationGracePeriodSeconds"] >= 30


def test_pods_get_settings_and_secrets(objects: list[Object]) -> None:
    for _, template in manifests.pods(objects):
        (container,) = template["spec"]["containers"]
        assert container["envFrom"] == [
            {"configMapRef": {"name": "longhaul"}},
            {"secretRef": {"name": "longhaul"}},
        ]


def test_pods_reach_names_redis_stores_and_collector_and_no_metadata(objects: list[Object]) -> None:
    policy = named(objects, "NetworkPolicy", "longhaul-egress")["spec"]
    assert policy["policyTypes"] == ["Egress"]
    assert policy["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "longhaul"}}
    ports = {(p["port"], p.get("protocol", "TCP")) for rule in policy["egress"] for p in rule["ports"]}
    store = int(option(command("store"), "s3.port"))
    assert ports == {(53, "UDP"), (53, "TCP"), (6379, "TCP"), (443, "TCP"), (store, "TCP"), (4318, "TCP")}
    (far,) = [rule["to"] for rule in policy["egress"] if {"port": 443} in rule["ports"]]
    assert far == [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}}]
    readme = (manifests.INFRA / "README.md").read_text()
    assert all(str(port) in readme for port, _ in ports if port != 53)


def test_workers_may_write_to_what_is_mounted(objects: list[Object]) -> None:
    for spec in workers(objects):
        security = spec["securityContext"]
        assert (security["fsGroup"], security["fsGroupChangePolicy"]) == (10001, "OnRootMismatch")


def test_how_many_workers_there_are_is_kedas_alone(objects: list[Object]) -> None:
    found = [
        made
        for made in objects
        if (made["kind"], made["metadata"]["name"]) == ("Deployment", "longhaul-worker")
    ]
    assert all("replicas" not in made["spec"] for made in found)


@pytest.mark.parametrize(
    ("overlay", "image", "gpus"),
    [
        ("base", "longhaul-worker-cpu", None),
        ("overlays/gpu", "longhaul-worker", 1),
        ("overlays/gpu-jobs", "longhaul-worker", 1),
    ],
)
def test_workers_of_an_overlay_have_their_image_and_their_gpu(
    overlay: str, image: str, gpus: int | None
) -> None:
    (spec,) = workers(manifests.built(overlay))
    (container,) = spec["containers"]
    assert container["image"].partition(":")[0] == image
    limits = container["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == gpus
    assert limits.keys() <= {"memory", "nvidia.com/gpu"}
    taken = [one["key"] for one in spec.get("tolerations", ())]
    assert taken == (["nvidia.com/gpu"] if gpus else [])
    names = {made["kind"] for made in manifests.built(overlay)}
    assert {"NetworkPolicy", "ConfigMap", "Service", "TriggerAuthentication"} <= names


def test_a_job_is_started_anew_by_keda_alone_and_left_in_peace() -> None:
    job = named(manifests.built("overlays/gpu-jobs"), "ScaledJob", "longhaul-worker")["spec"]
    assert job["jobTargetRef"]["backoffLimit"] == 0
    assert job["rollout"] == {"strategy": "gradual"}
    annotations = job["jobTargetRef"]["template"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert annotations["karpenter.sh/do-not-disrupt"] == "true"
