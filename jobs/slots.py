"""A place for one worker process: a GPU or a share of the CPU. It starts it, sees it serve, and buries it."""

import contextlib
import fcntl
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jobs import errors, restarts, servers, worker_log
from jobs.settings import Settings

LONGEST_PAUSE_SECONDS = 60.0
MOST_CRASHES_AT_START = 5
"""So many in a row that never served: it will not come to serve."""
MOST_CRASHES = 20
"""So many in a row of which none served for long; a request that kills workers is given up long before."""
CALM_SECONDS = 600.0
_ROOT = Path(__file__).resolve().parents[1]


class SlotTaken(errors.LonghaulError):
    """Another autoscaler (pid {pid}) has {slot} of this machine for the namespace {namespace}."""


@dataclass(frozen=True)
class End:
    """How a worker ended. `pause_seconds`: until another may start here; None: none will, it is given up."""

    model: str | None
    status: int
    served: bool
    crashes: int
    pause_seconds: float | None
    tail: str


class Crashes:
    """Those of one model in one slot, in a row."""

    def __init__(self) -> None:
        self.at_start = self.later = 0

    def add(self, served_seconds: float | None) -> float | None:
        """Count one, after it served for so long (None: never); return the pause, or None to give up."""
        if served_seconds is None:
            self.at_start += 1
        else:
            self.at_start = 0
            self.later = 1 if served_seconds > CALM_SECONDS else self.later + 1
        if self.at_start >= MOST_CRASHES_AT_START or self.later >= MOST_CRASHES:
            return None
        return float(min(LONGEST_PAUSE_SECONDS, 2 ** (self.at_start + self.later - 1)))


class Slot:
    """At most one worker at a time. `environment` is what makes it run there.

    A thread must start workers that lives as long as they should: see servers.Server.
    """

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str],
        logs: Path,
        settings: Settings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._environment, self._settings, self._clock = name, environment, settings, clock
        # Names of MIG devices have slashes.
        self._plain = re.sub(r"[^\w-]", "", name.replace("/", "-"))
        self._log = logs / f"worker-{self._plain}.log"
        self._crashes: dict[str | None, Crashes] = {}
        self._given_up: set[str | None] = set()
        self._due = 0.0
        self._started = 0.0
        self._served_at: float | None = None
        self._stillborn: End | None = None
        self._lock: IO[str] | None = None
        self.worker: servers.Server | None = None
        self.model: str | None = None
        self.retiring = self.silent = self.hung = False
        self.reported: str | None = None
        """What its worker last said of itself in Redis; `silent`: it says nothing, and its leases ran out."""

    @property
    def serving(self) -> bool:
        """Whether its worker takes requests."""
        there = self.worker is not None and self._served_at is not None
        return there and not (self.retiring or self.silent)

    @property
    def starting(self) -> bool:
        """Whether its worker has not come to serve yet."""
        return self.worker is not None and self._served_at is None and not self.retiring

    @property
    def pid(self) -> int | None:
        return self.worker.process.pid if self.worker else None

    @property
    def metrics(self) -> str | None:
        """Where its worker serves metrics, as its log says."""
        return worker_log.metrics(self.worker) if self.worker else None

    def may_start(self, model: str | None) -> bool:
        """Whether a worker of that model can be started here now."""
        return self.worker is None and model not in self._given_up and self._clock() >= self._due

    def given_up(self, model: str | None) -> bool:
        """Whether no worker of that model will be started here any more."""
        return model in self._given_up

    def start(self, model: str | None) -> None:
        """Start a worker of the model (its name; None: control alone). One that cannot be has ended."""
        assert self.worker is None
        # Celery forgets the working directory after importing the app; later imports need the path.
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | self._environment | {"LONGHAUL_MODEL": model or "none", "PYTHONPATH": path}
        command = [sys.executable, "-m", "celery", "-A", "worker", "worker"]
        command += ["--hostname", f"{self._plain}-{os.getpid()}@%h"]
        stop_seconds = self._settings.drain_seconds + 20
        self.model, self.reported = model, None
        self.retiring = self.silent = self.hung = False
        self._started, self._served_at = self._clock(), None
        try:
            self.worker = servers.Server(
                f"worker on {self.name}",
                command,
                self._log,
                environment=environment,
                stop_seconds=stop_seconds,
            )
        except OSError as error:  # no place for its log, or no memory for a process
            self._stillborn = self._end(1, None, f"  {error}")

    def served(self) -> float | None:
        """Notice that the worker has come to serve; return, once, how many seconds that took."""
        if self.worker is None or self._served_at is not None:
            return None
        if self.reported != "serving" and not restarts.served(self.worker):
            return None
        self._served_at = self._clock()
        return self._served_at - self._started

    def ended(self) -> End | None:
        """Notice, once, that the worker has ended."""
        if self._stillborn is not None:
            end, self._stillborn = self._stillborn, None
            return end
        worker = self.worker
        if worker is None or worker.running:
            return None
        worker.kill()  # what it left behind in its group
        status = worker.process.returncode
        served_at = self._served_at
        if served_at is None and restarts.served(worker):
            served_at = self._clock()
        self.worker = None
        return self._end(status, served_at, worker.tail() if status else "")

    def _end(self, status: int, served_at: float | None, tail: str) -> End:
        """Count an end, and decide when another worker may start here."""
        crashes = self._crashes.setdefault(self.model, Crashes())
        pause: float | None = 0.0
        if status:
            pause = crashes.add(None if served_at is None else self._clock() - served_at)
            if pause is None:
                self._given_up.add(self.model)
        self._due = self._clock() + (pause or 0.0)
        count = crashes.at_start + crashes.later
        return End(self.model, status, served_at is not None, count, pause, tail)

    def terminate(self) -> None:
        """Ask the worker to drain; returns at once."""
        if self.worker is not None:
            self.worker.terminate()

    def stop(self) -> int:
        """Wait until the worker has drained; kill what does not. Returns the requests that it gave back."""
        if self.worker is None:
            return 0
        self.worker.stop()
        given_back = worker_log.given_back(self.worker)
        self.worker = None
        return given_back

    def kill(self) -> None:
        """Kill the worker at once."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None

    def end_hung(self) -> None:
        """Kill a worker that gets nowhere. Does not wait: one that waits for a device may not even die."""
        if self.worker is not None:
            self.retiring = self.hung = True
            self.worker.kill_soon()

    def lock(self) -> None:
        """Keep other autoscalers of this namespace out of this slot; raises SlotTaken. Twice is once."""
        if self._lock is not None:
            return
        facts = "\0".join([self._settings.redis_url, self._settings.namespace, self.name])
        digest = hashlib.sha256(facts.encode()).hexdigest()[:16]
        path = Path(tempfile.gettempdir()) / f"longhaul-slot-{os.getuid()}-{digest}"
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                pid = lock.read().strip()
            raise SlotTaken(pid=pid, slot=self.name, namespace=self._settings.namespace) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def unlock(self) -> None:
        """Let others have it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._lock.close()
            self._lock = None


def locked(slot: Slot) -> bool:
    """Whether a slot is ours, or could be made so."""
    try:
        slot.lock()
    except SlotTaken:
        return False
    return True


def gpu_slots(ids: list[str], logs: Path, settings: Settings) -> list[Slot]:
    """Return a slot for each GPU, by what CUDA_VISIBLE_DEVICES calls it."""
    return [Slot(f"gpu {id}", {"CUDA_VISIBLE_DEVICES": id}, logs, settings) for id in ids]


def cpu_slots(count: int, logs: Path, settings: Settings) -> list[Slot]:
    """Return slots without a GPU, which share the processors."""
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, count))
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }
    return [Slot(f"cpu {number}", environment, logs, settings) for number in range(count)]


def gpus() -> list[str]:
    """Return the numbers of this machine's NVIDIA GPUs, as far as the driver shows them."""
    folder = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number in range(len(list(folder.iterdir())))] if folder.is_dir() else []
