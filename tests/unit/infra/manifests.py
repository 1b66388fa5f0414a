"""What infra/ and the Dockerfile say, read for the tests."""

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
K8S = INFRA / "k8s"
OVERLAYS = ("base", "overlays/gpu", "overlays/gpu-jobs")
EXAMPLE = "overlays/example"
COMPOSE = (INFRA / "compose.yaml", INFRA / "compose.gpu.yaml")
# What only changes objects that are elsewhere.
PATCHES = {K8S / "overlays" / "gpu" / "worker.yaml"}

Object = dict[str, Any]


def written() -> list[Object]:
    """Return the objects of all files, as they are written."""
    files = sorted(set(K8S.rglob("*.yaml")) - PATCHES)
    made = [made for file in files for made in yaml.safe_load_all(file.read_text())]
    return [one for one in made if one["kind"] not in ("Kustomization", "Component")]


@functools.cache
def _built(overlay: str) -> str:
    command = ["kubectl", "kustomize", str(K8S / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def built(overlay: str) -> list[Object]:
    """Return the objects that `kubectl apply -k` would make of an overlay."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH")
    return list(yaml.safe_load_all(_built(overlay)))


def pods(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """Yield the component and the pod template of whatever starts pods."""
    for made in objects:
        spec = made.get("spec", {})
        template = spec.get("template") or spec.get("jobTargetRef", {}).get("template")
        if template:
            yield made["metadata"]["labels"]["app.kubernetes.io/component"], template


class _Loader(yaml.SafeLoader):
    """Knows the tags of Compose's own."""


_Loader.add_constructor("!override", lambda loader, node: loader.construct_mapping(node, deep=True))


def compose(file: Path = COMPOSE[0]) -> Object:
    """Return a compose file, YAML's own merges resolved, without what only serves for merging."""
    made = yaml.load(file.read_text(), _Loader)
    return {name: value for name, value in made.items() if not name.startswith("x-")}


def stages() -> dict[str, list[str]]:
    """Return the instructions of each stage of the Dockerfile, continued lines joined, comments left out."""
    found: dict[str, list[str]] = {}
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    for line in filter(None, re.sub(r"\\\n\s*", "", text).splitlines()):
        if line.startswith("FROM "):
            name = line.rpartition(" AS ")[2]
            found[name] = []
        found[name].append(line)
    return found
