"""The numbers and commands of infra/README.md are those of the files and the programs."""

import re

import pytest

from jobs import cli
from jobs.settings import Settings
from tests.unit.infra import manifests
from worker import celery

README = (manifests.INFRA / "README.md").read_text()
CHANGED = {
    row.split("|")[1].strip(): row.split("|")[3].strip()
    for row in README.splitlines()
    if row.startswith("| ")
}


def found(pattern: str) -> set[str]:
    """Return what the manifests say, wherever they say it."""
    text = "\n".join(file.read_text() for file in sorted(manifests.K8S.rglob("*.yaml")))
    values = set(re.findall(pattern, text))
    assert values
    return values


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        ("`maxReplicaCount`", r"maxReplicaCount: (\d+)"),
        ("`listLength` of requests", r'requests:\S+\n\s+listLength: "(\d+)"'),
        (
            "`cooldownPeriod`, `stabilizationWindowSeconds`",
            r"(?:cooldownPeriod|stabilizationWindowSeconds): (\d+)",
        ),
        ("`LONGHAUL_DRAIN_SECONDS`", r'LONGHAUL_DRAIN_SECONDS: "(\d+)"'),
        ("`listLength` of control", r':control"\n\s+listLength: "(\d+)"'),
        ("`pollingInterval`", r"pollingInterval: (\d+)"),
        ("`--exit-when-idle`", r'"--exit-when-idle", "(\d+)"'),
        ("`replicas` of the API", r"replicas: (\d+)"),
    ],
)
def test_a_number_to_change_is_what_the_files_have(row: str, pattern: str) -> None:
    assert found(pattern) == {CHANGED[row].removesuffix(" s")}


def worker_pods() -> list[manifests.Object]:
    found = manifests.pods(manifests.written())
    return [template["spec"] for component, template in found if component == "worker"]


def test_memory_and_caches_are_what_the_files_have() -> None:
    memory, caches = (set(re.findall(r"\d+", part)) for part in CHANGED["memory, `sizeLimit`"].split(";"))
    limits = {spec["containers"][0]["resources"]["limits"]["memory"] for spec in worker_pods()}
    assert limits == {f"{size}Gi" for size in memory}
    assert found(r"name: cache\n\s+emptyDir: \{sizeLimit: (\d+)Gi") == caches


def test_scratch_shared_memory_and_processors_are_what_the_files_have() -> None:
    def sizes(row: str) -> set[str]:
        return set(re.findall(r"\d+m?", CHANGED[row]))

    assert sizes("shm `sizeLimit`") == found(r"medium: Memory, sizeLimit: (\d+)Gi")
    assert sizes("CPU requests") == found(r'requests: \{cpu: "?(\d+m?)')
    scratch = {
        volume["emptyDir"]["sizeLimit"]
        for spec in worker_pods()
        for volume in spec["volumes"]
        if volume["name"] == "scratch"
    }
    assert {f"{size}Gi" for size in sizes("scratch `sizeLimit`")} == scratch


def test_a_large_job_asks_for_all_workers_at_once() -> None:
    (most,), (length,) = found(r"maxReplicaCount: (\d+)"), found(r'requests:\S+\n\s+listLength: "(\d+)"')
    assert 128 / int(length) == int(most)
    assert f"ceil(requests / {length})" in README
    assert f"({Settings.model_fields['feed_window_requests'].default:,})" in README


def test_pods_get_as_much_longer_as_it_says() -> None:
    (drain,) = found(r'LONGHAUL_DRAIN_SECONDS: "(\d+)"')
    (more,) = re.findall(r"`terminationGracePeriodSeconds` is (\d+) more", README)
    graces = {spec["terminationGracePeriodSeconds"] for spec in worker_pods()}
    assert graces == {int(drain) + int(more)}


def test_commands_of_longhaul_exist() -> None:
    named = re.findall(r"(?:-- |exec api |`)longhaul ([a-z-]+)(?: (create))?", README)
    assert {name for name, _ in named} == {"keys", "queue-keys", "autoscale"} <= {*cli.main.commands}
    assert "create" in getattr(cli.main.commands["keys"], "commands", ())
    assert ("keys", "create") in named
    known = {name for one in celery.app.user_options["worker"] for name in one.opts}
    used = set(re.findall(r"celery -A worker worker (--[a-z-]+)", README))
    assert used
    assert used <= known


def test_directories_that_commands_name_exist() -> None:
    for name in re.findall(r"kubectl apply -k (\S+)", README):
        assert (manifests.INFRA / name / "kustomization.yaml").is_file()
    assert re.findall(r"^cd (\S+) && cp (\S+) ", README, re.MULTILINE) == [("infra", "env.example")]
