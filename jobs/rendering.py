"""Render chat templates in processes of their own, so that no template can harm the one that plans."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import orjson

from jobs import rendering_process

_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")
"""Of the environment; the rest holds secrets."""


class RenderFailed(Exception):
    """A template was wrong, or more than it may be; the message is for the client."""


class Renderer:
    """Renders from any thread; each that renders has a process, which is kept for the next."""

    def __init__(self, cpu_seconds: float = 5) -> None:
        self._cpu_seconds = cpu_seconds
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def render(
        self, template: str, messages: list[dict[str, Any]], continue_final: bool, variables: dict[str, Any]
    ) -> str:
        """Return what a template makes of JSON values; raises RenderFailed."""
        arguments = {"messages": messages, "continue_final": continue_final, "variables": variables}
        text: str = self._call("render", template=template, **arguments)
        return text

    def variables(self, template: str) -> frozenset[str]:
        """Return the names that a template takes from outside; raises RenderFailed."""
        return frozenset(self._call("variables", template=template))

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _call(self, function: str, **arguments: Any) -> Any:
        try:
            line = orjson.dumps([function, arguments])
        except TypeError as error:  # arguments of a tool's call that nest deeply
            raise RenderFailed(str(error)) from None
        answer = orjson.loads(self._asked(line))
        if "error" in answer:
            raise RenderFailed(answer["error"])
        return answer["value"]

    def _asked(self, line: bytes) -> bytes:
        # Twice, since somebody else may have ended a process that waited.
        for _ in range(2):
            process = self._take()
            try:
                answer = _ask(process, line)
            except BaseException:
                _end(process)
                raise
            if answer.endswith(b"\n"):
                with self._lock:
                    self._idle.append(process)
                return answer
            _end(process)
            if process.returncode == -signal.SIGPROF:
                raise RenderFailed(f"it took more than {self._cpu_seconds:g} s of computing")
        raise RenderFailed("it ended the process that rendered it")

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        # -P: the folder of the script, where modules are named like those of Python, is not searched.
        return subprocess.Popen(
            [sys.executable, "-P", rendering_process.__file__, str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            start_new_session=True,  # Ctrl-C is for who asks
        )


def _ask(process: subprocess.Popen[bytes], line: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


shared = Renderer()
atexit.register(shared.close)
