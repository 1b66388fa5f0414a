"""The checks that need what workers install: run by a process of their own, which may hang, or crash."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

import orjson

from jobs.doctor_findings import Finding, Look

_look = Look("machine")
_MODULE = "worker.doctor"


def check(seconds: float, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the process finds, as it finds it; it is killed after so many seconds."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing or importlib.util.find_spec("worker") is None:
        said = f"models, GPU and compiler: {' and '.join(missing) or 'the worker'} is not installed"
        yield _look.unchecked("worker", said, "Where workers run: pip install 'longhaul[worker]'")
        return
    child = subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=dict(os.environ) | dict(environment),
    )
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        child.kill()

    late = threading.Timer(seconds, end)
    late.start()
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith(b"{"):  # a library may print, too
                yield Finding(**orjson.loads(line))
        code = child.wait()
    finally:
        late.cancel()
        child.kill()
        child.stdout.close()
        child.wait()
    if code:
        how = f"took more than {seconds:g} s and was killed" if is_late.is_set() else f"ended with {code}"
        said = f"the check of models and devices {how}"
        yield _look.wrong("worker", said, "Run it alone to see why: python -m worker.doctor")
