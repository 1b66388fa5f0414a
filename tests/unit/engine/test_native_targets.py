"""The kernels of other processors than this one, as far as this one can run them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.unit.engine.conftest import native_or_skip

# What a processor must have, as /proc/cpuinfo has it, to run what is compiled for another one.
NEEDED: dict[str, set[str]] = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma"},
    "alderlake": {"avx2", "avx_vnni"},
    "skylake-avx512": {"avx512f", "avx512bw"},
}


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


@pytest.mark.long
@pytest.mark.parametrize("target", NEEDED)
def test_products_are_right_on_lesser_processors(target: str, tmp_path: Path) -> None:
    native_or_skip(torch.float32)
    if not _flags() >= NEEDED[target]:
        pytest.skip(f"this processor runs nothing that is compiled for {target}")
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -march={target}\n')
    compiler.chmod(0o755)
    here = Path(__file__).parent
    tests = [str(here / name) for name in ("test_int_linear.py", "test_products.py")]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests],
        env=os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )
