"""Install the peers into .longhaul/peers/<name>, each with exactly the packages of its <name>.txt here.

Without dependencies: the lists are complete, and leave out torchvision, torchaudio and torchcodec. Language
models do without them, and builds that do not match torch break the import of everything else. TORCH_INDEX
names one more package index, as for `make`. llama.cpp is compiled for this CPU (ten minutes on one core;
CMAKE_BUILD_PARALLEL_LEVEL says how many).
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENVS = HERE.parents[1] / ".longhaul" / "peers"
NAMES = ("vllm", "openvino", "llamacpp")
_FLAGS = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"}
"""For llama.cpp, which is no wheel: this CPU's instructions, and nothing for images."""


def main() -> None:
    """Install the peers that are named, or all; one that is up to date is left alone."""
    names = sys.argv[1:] or NAMES
    for name in names:
        if name not in NAMES:
            sys.exit(f"{name!r} is not a peer with an environment of its own: {', '.join(NAMES)}")
    for name in names:
        build(name)


def build(name: str) -> None:
    """Install one peer."""
    pins = HERE / f"{name}.txt"
    venv = VENVS / name
    stamp = venv / "longhaul-stamp"
    wanted = hashlib.sha256(f"{venv}\n".encode() + pins.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{name}: up to date in {venv}", flush=True)
        return
    print(f"{name}: installing into {venv} (a few minutes)", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    _run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", venv)
    index = os.environ.get("TORCH_INDEX")
    more = ["--extra-index-url", index] if index else []
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    _run(*pip, "install", "-qq", "--no-deps", *more, "--requirement", pins)
    # Last: a stamp is there only after everything before it succeeded.
    stamp.write_text(wanted)


def _run(*command: str | Path) -> None:
    if subprocess.run([str(part) for part in command], check=False, env=_FLAGS | os.environ).returncode:
        sys.exit(f"'{' '.join(map(str, command))}' failed")


if __name__ == "__main__":
    main()
