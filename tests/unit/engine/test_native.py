"""The kernels are built once for a machine; without a compiler torch's operations give the same tokens."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from jobs import errors
from tests.unit.engine.conftest import request
from worker.engine import Engine, EngineConfig, loader, opening
from worker.engine.fallback import FallbackEngine
from worker.engine.native import library

REQUESTS = [request(str(i), [5, 6, 7, *range(i, i + 20)], max_tokens=8) for i in range(4)]
_CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the library forget what it has found, before and after, and keep what it builds in a new place."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def forget() -> None:
    for known in (library._library, library._kernels, library._warn):
        known.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real compiler, fast since it does not optimize, that notes what it builds; its notes."""
    real = next((found for name in library._COMPILERS if (found := shutil.which(name))), None)
    if real is None:
        pytest.skip("no C++ compiler on this machine")
    notes = tmp_path / "notes"
    write_compiler(tmp_path, monkeypatch, f'echo built >> {notes}; exec {real} "$@" -O0', real)
    return notes


def write_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, builds: str, version: str = "echo") -> None:
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {version} --version\n{builds}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def open_tiny(path: Path, **fields: str) -> Engine:
    return opening.open_model(str(path), EngineConfig(device="cpu", dtype="float64", **fields))  # type: ignore


def tokens(engine: Engine) -> dict[str, list[int]]:
    try:
        return {c.id: c.token_ids for c in engine.generate(REQUESTS)}
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> dict[str, list[int]]:
    return tokens(open_tiny(tiny_path, kernels="torch"))


def reasons(caplog: pytest.LogCaptureFixture) -> str:
    """The reasons of all that was logged."""
    return "\n".join(str(vars(record).get("reason", "")) for record in caplog.records)


def test_without_a_compiler_torch_gives_the_same_tokens(
    tiny_path: Path,
    tmp_path: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = open_tiny(tiny_path)
    assert (engine.stats.fallbacks, engine.stats.native_kernels) == (0, 0)
    assert tokens(engine) == expected
    assert caplog.text.count("slower") == 1
    assert "no C++ compiler (g++, c++, clang++) on PATH" in reasons(caplog)


def test_a_compiler_that_fails_is_tried_once_and_its_error_told(
    tiny_path: Path,
    tmp_path: Path,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = tmp_path / "notes"
    says = "echo In file included >&2; echo 'kernels.cpp:1: error: boom' >&2; echo more >&2; exit 1"
    write_compiler(tmp_path, monkeypatch, f"echo built >> {notes}; {says}")
    engine = open_tiny(tiny_path)
    assert engine.stats.native_kernels == 0
    assert tokens(engine) == expected
    assert caplog.text.count("slower") == 1
    assert "kernels.cpp:1: error: boom" in reasons(caplog)
    assert notes.read_text() == "built\n"


def test_the_kernels_are_built_once_and_give_the_same_tokens(
    tiny_path: Path, compiler: Path, expected: dict[str, list[int]]
) -> None:
    for _ in range(2):
        engine = open_tiny(tiny_path, kernels="native")
        assert engine.stats.native_kernels == 1
        assert tokens(engine) == expected
        forget()
    assert compiler.read_text() == "built\n"


@pytest.mark.long
def test_a_broken_library_is_built_again(compiler: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, path = library.cached()
    path.write_bytes(b"not a library")
    assert library.kernels(torch.float64, _CPU) is not None
    assert "built again" in caplog.text
    assert compiler.read_text() == "built\n"


def test_a_cache_that_cannot_be_written_is_told(
    cache: Path, compiler: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file, not a directory")
    assert library.kernels(torch.float64, _CPU) is None
    assert str(cache) in reasons(caplog)


def test_native_refuses_to_load_without_kernels_and_torch_never_builds(
    tiny_path: Path, tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tiny(tiny_path, kernels="torch").close()
    assert not compiler.exists()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(errors.ModelUnavailable, match=r"LONGHAUL_KERNELS=native: no C\+\+ compiler"):
        open_tiny(tiny_path, kernels="native")
    with pytest.raises(errors.ModelUnavailable, match="no kernels for bfloat16 on cpu"):
        opening.open_model(str(tiny_path), EngineConfig(device="cpu", dtype="bfloat16", kernels="native"))
    with pytest.raises(ValueError, match="kernels must be one of auto, native, torch, not 'cuda'"):
        EngineConfig(kernels="cuda")  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [True, False])
def test_torch_does_not_build_to_draw_tokens_either(tiny_path: Path, compiler: Path, fast: bool) -> None:
    config = EngineConfig(device="cpu", dtype="float64", fast=fast, kernels="torch")
    engine = opening.open_model(str(tiny_path), config)
    assert engine.stats.fallbacks == (not fast)
    sampled = [request(str(i), [5, 6, i], temperature=1.0, seed=i, logprobs=2) for i in range(3)]
    assert [completion.error for completion in engine.generate(sampled)] == [None] * 3
    engine.close()
    assert not compiler.exists()


@pytest.mark.long
def test_native_refuses_a_model_that_falls_back(
    tiny_loaded: loader.Loaded, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[FallbackEngine] = []
    close = FallbackEngine.close
    monkeypatch.setattr(FallbackEngine, "close", lambda self: (closed.append(self), close(self))[1])
    with pytest.raises(library.Unavailable, match="generate"):
        opening.over(tiny_loaded, EngineConfig(fast=False, kernels="native"))
    assert len(closed) == 1


@pytest.mark.long
def test_disabled_holds_in_its_own_thread_alone(compiler: Path) -> None:
    with ThreadPoolExecutor(1) as other, library.disabled():
        assert library.kernels(torch.float64, _CPU) is None
        assert other.submit(library.kernels, torch.float64, _CPU).result() is not None
    assert library.kernels(torch.float64, _CPU) is not None


def test_a_cache_that_others_can_write_to_is_not_loaded(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    (tmp_path / "shared" / "longhaul" / "kernels").mkdir(parents=True)
    (tmp_path / "shared" / "longhaul" / "kernels").chmod(0o777)
    with pytest.raises(library.Unavailable, match="can be written to by others"):
        library._cache()


def test_a_user_without_a_home_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.Path, "home", homeless)
    with pytest.raises(library.Unavailable, match="XDG_CACHE_HOME"):
        library._cache()
