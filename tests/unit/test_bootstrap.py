"""infra/venv.py: what is complete is left alone, what is half there is found."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "infra" / "venv.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, working on a checkout and a .venv of this test."""
    spec = importlib.util.spec_from_file_location("longhaul_bootstrap", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    for name in module.INPUTS:
        (tmp_path / name).write_text(name)
    places = {"ROOT": tmp_path, "VENV": venv, "PYTHON": venv / "bin" / "python", "STAMP": venv / "stamp"}
    for name, value in places.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.delenv("PYTHON", raising=False)
    return module


def package(bootstrap: ModuleType) -> Path:
    """A whole installed package."""
    site: Path = bootstrap.site_packages()
    (site / "thing.py").write_text("x = 1\n")
    info = site / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: thing")
    (info / "RECORD").write_text(
        "thing.py,sha256=x,6\n__pycache__/thing.pyc,,\nthing-1.0.dist-info/RECORD,,\n"
    )
    return info


def test_a_matching_stamp_means_nothing_to_do(bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.STAMP.write_text(bootstrap.fingerprint())
    monkeypatch.setattr(bootstrap, "install", lambda: pytest.fail("installed again"))
    bootstrap.main()


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_a_changed_pin_is_installed(bootstrap: ModuleType, name: str) -> None:
    bootstrap.STAMP.write_text(bootstrap.fingerprint())
    (bootstrap.ROOT / name).write_text("another")
    assert not bootstrap.is_current(bootstrap.fingerprint())


def test_a_python_that_is_gone_is_noticed(bootstrap: ModuleType) -> None:
    bootstrap.STAMP.write_text(bootstrap.fingerprint())
    bootstrap.PYTHON.unlink()
    bootstrap.PYTHON.symlink_to("/nonexistent/python")
    assert not bootstrap.is_current(bootstrap.fingerprint())


def test_an_interrupted_install_leaves_no_stamp(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    bootstrap.STAMP.write_text("old")
    monkeypatch.setattr(bootstrap, "make_venv", lambda: None)
    monkeypatch.setattr(bootstrap, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bootstrap.main()
    assert not bootstrap.STAMP.exists()


def test_a_whole_package_stays(bootstrap: ModuleType) -> None:
    info = package(bootstrap)
    bootstrap.drop_half_installed()
    assert info.exists()


@pytest.mark.parametrize(
    "missing", ["thing.py", "thing-1.0.dist-info/RECORD", "thing-1.0.dist-info/METADATA"]
)
def test_a_package_with_a_missing_file_is_forgotten(bootstrap: ModuleType, missing: str) -> None:
    info = package(bootstrap)
    (info.parent / missing).unlink()
    bootstrap.drop_half_installed()
    assert not info.exists()


def test_a_package_with_a_truncated_file_is_forgotten(bootstrap: ModuleType) -> None:
    info = package(bootstrap)
    (info.parent / "thing.py").write_text("x")
    bootstrap.drop_half_installed()
    assert not info.exists()
