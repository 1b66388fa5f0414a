"""A variable that is no setting ends every process it is given to: the files name none."""

import re
from pathlib import Path

import pytest

from jobs.settings import CLIENT_VARIABLES, PREFIX, Settings
from tests.unit.infra import manifests

KNOWN = CLIENT_VARIABLES | {PREFIX + name.upper() for name in Settings.model_fields}
KINDS = {".yaml", ".md", ".json", ".example", ".env", ""}
FILES = [
    manifests.ROOT / "Dockerfile",
    *(f for f in manifests.INFRA.rglob("*") if f.suffix in KINDS and f.is_file()),
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(manifests.ROOT)))
def test_every_variable_is_a_setting(file: Path) -> None:
    assert set(re.findall(r"\bLONGHAUL_[A-Z0-9_]+[A-Z0-9]\b", file.read_text())) <= KNOWN


def test_variables_are_found() -> None:
    assert sum("LONGHAUL_" in file.read_text() for file in FILES) >= 4
