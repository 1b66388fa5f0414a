"""Fixtures of the unit tests."""

from pathlib import Path

import hypothesis
import pytest

from tests.unit import planning

# Machines that run tests beside other work pause for longer than any deadline.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tokenizer (one token a byte) and a chat template, without weights."""
    return planning.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def planned(tmp_path: Path, tokenizer_dir: Path) -> planning.Planning:
    """Plans bytes: `planned(data)`."""
    return planning.Planning(tmp_path, tokenizer_dir)
