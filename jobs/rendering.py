"""Render chat templates in processes of their own, so that no template can harm the one that plans."""

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from jobs import rendering_process

_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")
"""Of the environment; the rest holds secrets."""


class RenderFailed(Exception):
    """A template was wrong, or more than it may be; the message is for the client."""


@dataclass(frozen=True)
class Call:
    """A template, and the JSON values that it is to render."""

    template: str
    messages: list[dict[str, Any]]
    continue_final: bool
    variables: dict[str, Any]


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
        text: str = _value(*self.render_all([Call(template, messages, continue_final, variables)]))
        return text

    def render_all(self, calls: Sequence[Call]) -> list[str | RenderFailed]:
        """Return what templates make of JSON values, or why they do not, in the order of the calls."""
        templates = list(dict.fromkeys(call.template for call in calls))
        number = {template: index for index, template in enumerate(templates)}
        lines = [
            _dumped("render", number[call.template], call.messages, call.continue_final, call.variables)
            for call in calls
        ]
        answers = iter(self._answers(templates, [line for line in lines if isinstance(line, bytes)]))
        return [next(answers) if isinstance(line, bytes) else line for line in lines]

    def variables(self, template: str) -> frozenset[str]:
        """Return the names that a template takes from outside; raises RenderFailed."""
        return frozenset(_value(*self._answers([template], [orjson.dumps(["variables", 0])])))

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            _end(process)

    def _answers(self, templates: list[str], lines: list[bytes]) -> list[Any]:
        """Ask for all at once; if that ends the process, one by one, so that the guilty are alone."""
        answers: list[Any] = []
        if len(lines) > 1:
            answers, _ = self._ask(self._take(), templates, lines)
        return answers + [self._answer(templates, line) for line in lines[len(answers) :]]

    def _answer(self, templates: list[str], line: bytes) -> Any:
        # Twice, since somebody else may have ended a process that waited, or left it little memory.
        for process in (self._take, self._start):
            answers, status = self._ask(process(), templates, [line])
            if answers:
                return answers[0]
            if status == -signal.SIGPROF:
                return RenderFailed(f"it took more than {self._cpu_seconds:g} s of computing")
        if status == rendering_process.NO_MEMORY:
            return RenderFailed(f"it took more than {rendering_process.MOST_BYTES >> 20} MiB of memory")
        return RenderFailed("it ended the process that rendered it")

    def _ask(
        self, process: subprocess.Popen[bytes], templates: list[str], lines: list[bytes]
    ) -> tuple[list[Any], int | None]:
        """Return the answers that a process gives before it ends, and its status; None: it waits for more."""
        try:
            answers = _exchange(process, templates, lines)
        except BaseException:
            _end(process)
            raise
        if len(answers) < len(lines):
            _end(process)
        else:
            with self._lock:
                self._idle.append(process)
        return answers, process.returncode

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: the folder of the script, where modules are named like those of Python, is not searched.
        return subprocess.Popen(
            [sys.executable, "-P", rendering_process.__file__, str(self._cpu_seconds)],
            bufsize=rendering_process.BUFFER_BYTES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            start_new_session=True,  # Ctrl-C is for who asks
        )


def _dumped(*values: Any) -> bytes | RenderFailed:
    try:
        return orjson.dumps(values)
    except TypeError as error:  # arguments of a tool's call that nest deeply
        return RenderFailed(str(error))


def _exchange(process: subprocess.Popen[bytes], templates: list[str], lines: list[bytes]) -> list[Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    answers: list[Any] = []
    with suppress(BrokenPipeError):
        process.stdin.write(b"\n".join([orjson.dumps([len(lines), templates]), *lines, b""]))
        process.stdin.flush()
        while len(answers) < len(lines) and (line := process.stdout.readline()).endswith(b"\n"):
            value, error = orjson.loads(line)
            answers.append(value if error is None else RenderFailed(error))
    return answers


def _value(answer: Any) -> Any:
    if isinstance(answer, RenderFailed):
        raise answer
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


shared = Renderer()
atexit.register(shared.close)
