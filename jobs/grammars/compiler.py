"""Whether a grammar compiles: tried in a process of its own, which the grammar may bring to any end.

A schema of a few kilobytes can take llguidance hours and all memory (patterns that intersect), or overflow
the stack (thousands of references after each other). None of that may reach whoever plans jobs, or runs them.
"""

import atexit
import json
import re
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

LEXER_FUEL = 300_000
"""What the expressions of a grammar may cost when it is compiled: some seconds at the very worst."""
CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30
STACK_BYTES = 2 << 20
"""A quarter of what the threads of an engine usually have, which compile the grammar again."""

TOO_SLOW = f"it takes more than {CPU_SECONDS} s to compile"
_TOO_LARGE = "it is too large, or its references go too deep"
OF_SIZE = (TOO_SLOW, _TOO_LARGE)
_FAULTS = {-signal.SIGPROF: TOO_SLOW} | dict.fromkeys(
    (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGILL), _TOO_LARGE
)

_SHOWN = re.compile(r"\n +\d+ \| ")


class Compiler:
    """A process that compiles one grammar after another, started when first needed. Safe for threads."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def reason(self, text: str) -> str | None:
        """Return in one line why a grammar does not compile, or None."""
        with self._lock:
            for _ in range(2):  # an end that is not the grammar's doing is worth another try
                answer = self._asked(text)
                if answer:
                    reason: str | None = json.loads(answer)
                    return reason
                ended = self._end()
                if ended in _FAULTS:
                    return _FAULTS[ended]
        raise RuntimeError(f"the process that compiles grammars ended with {ended}")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _asked(self, text: str) -> str:
        """Return the answer of the process, empty if it ended."""
        if self._process is None:
            self._process = _start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(text) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def _end(self) -> int | None:
        """Let the process end, if there is one, and return how it did."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            process.communicate()
        except BrokenPipeError:
            process.wait()
        return process.returncode


def _start() -> "subprocess.Popen[str]":
    return subprocess.Popen(
        # Without the folder of this file in its path: there are modules with names of the standard library's.
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,  # what interrupts us must not look like a grammar's fault
    )


_compiler = Compiler()
reason = _compiler.reason
atexit.register(_compiler.close)


def _compile(text: str, tokenizer: Any) -> str | None:
    """Compile a grammar here; return in one line why it does not, or None."""
    import llguidance

    limits = llguidance.LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error():
        return None
    # After the reason the library shows where in the grammar it is.
    reason = _SHOWN.split(matcher.get_error().split("failed to compile JSON schema: ")[-1])[0]
    if reason.startswith("oneOf"):  # it would have us set an option
        return "oneOf is supported where no two of its schemas can hold at once"
    return " ".join(reason.split()).rstrip(".")[:500]


def _serve() -> None:
    """Answer each line of standard input, a grammar in JSON, with its reason."""
    import llguidance

    tokenizer = llguidance.LLTokenizer("byte")  # a token for each byte
    for line in sys.stdin:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # of processor time; then the kernel ends us
        reason = _compile(text, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_serve).start()
