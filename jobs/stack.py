"""Everything on one machine: Redis, an S3 store, the API and workers as child processes of this one."""

import fcntl
import json
import os
import shlex
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from jobs import embedded, errors, hints, ports, restarts, servers, stack_lines
from jobs.model_settings import ModelSettings
from jobs.settings import CLIENT_VARIABLES, PREFIX, URL_VARIABLE

DEFAULT_DIRECTORY = hints.DIRECTORY
ENVIRONMENT = hints.ENVIRONMENT
PREFERRED_API_PORT = 8000
_ROOT = Path(__file__).resolve().parents[1]


class AlreadyRunning(errors.LonghaulError):
    """Another stack (pid {pid}) runs in {directory}. Stop it, or use another directory."""


class Stack:
    """The whole system as child processes; what it stores in `directory` is there again at the next start.

    Start it in a thread that lives as long as the stack (the main thread, say): the kernel ends the children
    when the thread that started them ends.

    directory    Redis data, the store, logs, keys
    models       what the deployment serves: name -> ModelSettings (or a dict of its fields)
    workers      how many workers are started; each runs LONGHAUL_MODEL, or all of `models` by turns
    store        "s3" starts SeaweedFS, "local" keeps objects in a directory
    api_port     0: the preferred port, or any free one when it is taken
    extra        more LONGHAUL_* variables for every process
    """

    def __init__(
        self,
        directory: Path | str = DEFAULT_DIRECTORY,
        *,
        models: Mapping[str, ModelSettings | Mapping[str, Any]] | None = None,
        workers: int = 1,
        store: Literal["s3", "local"] = "s3",
        api_port: int = 0,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(directory).resolve()
        self.logs = self.directory / "logs"
        self.environment: dict[str, str] = {}
        self.redis: embedded.RedisServer | None = None
        self.seaweedfs: embedded.SeaweedServer | None = None
        self.api: servers.Server | None = None
        self.workers: list[servers.Server] = []
        self._worker_count = workers
        self._store = store
        self._api_port = api_port
        self._extra = dict(extra or {})
        if models is not None:
            self._extra["LONGHAUL_MODELS"] = models_json(models)
        self._started: list[servers.Server] = []
        self._deaths = restarts.Deaths()
        self._due: dict[servers.Server, float] = {}
        self._lock: IO[str] | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def api_url(self) -> str:
        """The base URL of the API, without /v1."""
        return f"http://127.0.0.1:{self._api_port}"

    def __enter__(self) -> "Stack":
        self._previous_handlers = _interrupt_on(signal.SIGTERM, signal.SIGHUP)
        try:
            self.start()
        except BaseException:
            self._restore_handlers()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def start(self) -> None:
        """Start everything in order and wait until each part answers; stop it all again when one does not."""
        try:
            self._take_lock()
            self._start_servers()
            self._start_api()
            self._write_environment()
            for _ in range(self._worker_count):
                self.start_worker()
            for worker in self.workers:
                worker.wait_ready(partial(_celery_ready, worker))
        except BaseException:
            self.stop()
            raise

    def _start_servers(self) -> None:
        self.redis = embedded.RedisServer(self.directory / "redis", self.logs / "redis.log")
        self._started.append(self.redis.server)
        self.environment = {"LONGHAUL_REDIS_URL": self.redis.url}
        if self._store == "s3":
            keys = embedded.S3Keys.load(self.directory / "s3-keys.json")
            self.seaweedfs = embedded.SeaweedServer(
                self.directory / "store", self.logs / "seaweedfs.log", keys
            )
            self._started.append(self.seaweedfs.server)
            self.environment |= {
                "LONGHAUL_STORE_URL": f"s3://{self.seaweedfs.bucket}",
                "LONGHAUL_S3_ENDPOINT_URL": self.seaweedfs.endpoint_url,
                "LONGHAUL_S3_ACCESS_KEY_ID": keys.access_key,
                "LONGHAUL_S3_SECRET_ACCESS_KEY": keys.secret_key,
            }
            self.seaweedfs.wait_ready()
        else:
            self.environment["LONGHAUL_STORE_URL"] = f"file://{self.directory / 'objects'}"
        self.environment |= self._extra
        self.redis.wait_ready()

    def _start_api(self) -> None:
        if not self._api_port:
            free = ports.is_free(PREFERRED_API_PORT)
            self._api_port = PREFERRED_API_PORT if free else ports.take()
        command = [sys.executable, "-m", "api"]
        self.api = self._spawn("API", [*command, "--port", str(self._api_port)], "api.log")
        self.api.wait_ready(lambda: _answers(f"{self.api_url}/healthz"))

    def start_worker(self, extra: Mapping[str, str] | None = None) -> servers.Server:
        """Start one more worker and return it without waiting for it."""
        worker = self._spawn_worker(len(self.workers) + 1, extra)
        self.workers.append(worker)
        return worker

    def _spawn_worker(self, number: int, extra: Mapping[str, str] | None = None) -> servers.Server:
        command = [sys.executable, "-m", "celery", "-A", "worker", "worker", "--loglevel", "INFO"]
        # Host names keep the workers of one machine apart in Celery's remote control.
        command += ["--hostname", f"worker{number}-{os.getpid()}@%h"]
        extra = {"LONGHAUL_MODEL": self._worker_model} | dict(extra or {})
        return self._spawn(f"worker {number}", command, f"worker-{number}.log", extra, stop_seconds=45)

    def _spawn(
        self,
        name: str,
        command: list[str],
        log: str,
        extra: Mapping[str, str] | None = None,
        stop_seconds: float = 15,
    ) -> servers.Server:
        # Celery forgets the working directory after importing the app; later imports need the path.
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        environment = os.environ | self.environment | dict(extra or {}) | {"PYTHONPATH": path}
        server = servers.Server(
            name, command, self.logs / log, environment=environment, stop_seconds=stop_seconds
        )
        self._started.append(server)
        return server

    def poll(self) -> list[str]:
        """Replace workers that died and return a line about each; raise ServerFailed when that is in vain.

        The more died of late, the longer the pause before the next is started.
        """
        for server in self._started:
            if not server.running and server not in self.workers:
                raise server.failed(f"ended with exit status {server.process.returncode}")
        lines = []
        for index, worker in enumerate(self.workers):
            if worker.running:
                continue
            if worker not in self._due:
                pause = self._deaths.add(worker)
                self._due[worker] = time.monotonic() + pause
                lines.append(restarts.obituary(worker, pause))
            if time.monotonic() >= self._due[worker]:
                del self._due[worker]
                self._started.remove(worker)
                self.workers[index] = self._spawn_worker(index + 1)
        return lines

    def wait(self, report: Any = print) -> None:
        """Stay while everything runs; workers that die are replaced. Ends by an exception only."""
        while True:
            try:
                lines = self.poll()
            except servers.ServerFailed as error:
                report(f"{error.values['name']} has ended; stopping the rest, which may take a minute ...")
                raise
            for line in lines:
                report(line)
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop what was started, last first. An interruption (a second Ctrl-C) kills the rest at once."""
        try:
            for worker in self.workers:  # at once: each may take as long as its drain
                worker.terminate()
            while self._started:
                self._started[-1].stop()
                self._started.pop()
        finally:
            while self._started:
                self._started.pop().kill()
            self.workers = []
            # Without the lock the directory, and the variables in it, are another stack's.
            if self._lock is not None:
                (self.directory / ENVIRONMENT).unlink(missing_ok=True)
                self._lock.close()
                self._lock = None

    def describe(self) -> str:
        """Return what runs where, a line or two each."""
        store = self.environment["LONGHAUL_STORE_URL"]
        pids = [worker.process.pid for worker in self.workers]
        rows = {
            "web page": f"{self.api_url}/",
            "API": f"{self.api_url}/v1",
            "models": ", ".join(self._models) or "none: set LONGHAUL_MODELS",
            "workers": stack_lines.workers(pids, self._worker_model, self._models),
            "Redis": self.environment["LONGHAUL_REDIS_URL"],
            "store": f"{store} at {self.seaweedfs.endpoint_url} (SeaweedFS)" if self.seaweedfs else store,
            "data, logs": str(self.directory),
            "variables": hints.variables(self.directory),
        }
        return stack_lines.table(rows)

    def others(self, directory: Path, gpus: int) -> list[str]:
        """Return what to type for models that no worker runs; `directory`: this one, as its user calls it."""
        run = stack_lines.chosen(self._worker_model, self._models) if self._worker_count else []
        return stack_lines.others(run, self._models, directory, gpus)

    @property
    def _models(self) -> list[str]:
        return list(json.loads(self._variable("LONGHAUL_MODELS") or "{}"))

    @property
    def _worker_model(self) -> str:
        """What LONGHAUL_MODEL is for a worker; nobody else is told, since it may scale or serve others."""
        return self._variable("LONGHAUL_MODEL") or ("all" if self._models else "none")

    def _variable(self, name: str) -> str | None:
        return self.environment.get(name, os.environ.get(name))

    def _write_environment(self) -> None:
        """Leave the settings for other shells: `set -a; . .longhaul/environment`, and where the API is. With
        those of this process: whoever has others may look for requests of other models.
        """
        own = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
        settings = {name: own[name] for name in own.keys() - CLIENT_VARIABLES} | self.environment
        settings[URL_VARIABLE] = self.api_url
        path = self.directory / ENVIRONMENT
        path.touch(mode=0o600)
        path.write_text("".join(f"{name}={shlex.quote(settings[name])}\n" for name in sorted(settings)))

    def _take_lock(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = (self.directory / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with lock:
                lock.seek(0)
                raise AlreadyRunning(pid=lock.read().strip(), directory=self.directory) from None
        self._lock = lock
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()


def models_json(models: Mapping[str, ModelSettings | Mapping[str, Any]]) -> str:
    """Return LONGHAUL_MODELS for these models."""
    checked = {
        name: model if isinstance(model, ModelSettings) else ModelSettings(**model)
        for name, model in models.items()
    }
    return json.dumps({name: model.model_dump(exclude_defaults=True) for name, model in checked.items()})


def _celery_ready(worker: servers.Server) -> bool:
    return " ready." in worker.output()


def _interrupt_on(*numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Turn these signals into KeyboardInterrupt, so that they stop a stack too; return the old handlers."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, interrupt) for number in numbers}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
