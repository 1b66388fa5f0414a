"""Imports go one way: api -> jobs, worker -> jobs; nobody imports worker; only the worker loads torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"api": {"api", "jobs"}, "jobs": {"jobs"}, "worker": {"worker", "jobs"}}
HEAVY = ("torch", "transformers", "tokenizers", "numpy")
# What a host that only submits or serves the API does not install.
WORKER_ONLY = (*HEAVY, "accelerate", "gguf", "jinja2", "llguidance")
# What only jobs.dataset imports, and that only when `longhaul generate` runs.
DATA_ONLY = ("datasketch", "duckdb", "jsonschema", "pyarrow", "re2")


def _modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def _imports(path: Path, at_load: bool = False) -> Iterator[str]:
    """Yield the packages that a file imports; `at_load`: only what importing the file imports."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield (node.module or "").split(".")[0]
        if not (at_load and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            waiting.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_is_below_it(package: str) -> None:
    assert _modules(package)
    for path in _modules(package):
        ours = set(_imports(path)) & {"api", "jobs", "worker", "tests", "bench", "infra"}
        assert ours <= PACKAGES[package], f"{path.relative_to(ROOT)} imports {ours - PACKAGES[package]}"


@pytest.mark.parametrize("package", ["api", "jobs"])
def test_a_host_without_the_worker_extra_can_load_every_module(package: str) -> None:
    for path in _modules(package):
        heavy = set(_imports(path, at_load=True)) & {*WORKER_ONLY, *DATA_ONLY}
        if path.is_relative_to(ROOT / "jobs" / "dataset"):  # which of them loads when, the tests below see
            heavy -= {*DATA_ONLY, "jinja2", "numpy"}
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy} when it is loaded"


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _is_data(path: Path) -> bool:
    """Tell whether a module is loaded only when `longhaul generate` runs, which needs the extra `data`."""
    light = ("jobs/dataset/__init__.py", "jobs/dataset/command.py", "jobs/dataset/command_options.py")
    name = path.relative_to(ROOT).as_posix()
    return name.startswith("jobs/dataset/") and name not in light


@pytest.mark.timeout(60)
def test_loading_the_api_and_jobs_loads_neither_what_runs_models_nor_what_reads_datasets() -> None:
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for package in ("api", "jobs")
        for path in _modules(package)
        if path.stem not in ("__main__", "__init__") and not _is_data(path)
    ]
    script = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY + DATA_ONLY} if name in sys.modules])\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'worker'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]


@pytest.mark.timeout(60)
def test_loading_the_worker_and_its_command_loads_no_torch() -> None:
    script = (
        "import sys, worker.engine, worker.offline, worker.translate\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.timeout(60)
def test_loading_all_of_datasets_loads_neither_torch_nor_transformers() -> None:
    modules = [_dotted(path) for path in _modules("jobs") if _is_data(path)]
    assert modules
    script = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'transformers', 'worker') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_loads_nothing_that_is_slow(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from jobs import cli\n"
        f"cli.main({arguments}, standalone_mode=False)\n"
        f"print([name for name in {WORKER_ONLY + DATA_ONLY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Usage" in done.stdout
