"""The engine without a model: fast, deterministic, and faulty on demand."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jobs import errors
from tests.unit.engine.conftest import request
from worker.engine import EngineConfig
from worker.engine.echo import EchoEngine


def open_echo(path: Path, *faults: str, **fields: int) -> EchoEngine:
    return EchoEngine.open(str(path), EngineConfig(**fields), faults=faults)  # type: ignore[arg-type]


def test_it_repeats_the_end_of_the_prompt(tiny_path: Path) -> None:
    engine = open_echo(tiny_path)
    ids = engine.tokenizer.encode("hello world").ids
    (completion,) = engine.generate([request("a", ids, max_tokens=5)])
    assert completion.text == "world"
    assert completion.token_ids == ids[-5:]
    assert (completion.finish_reason, completion.cached_tokens) == ("length", 0)
    timings = completion.timings
    assert timings.first_token is not None
    assert timings.admitted <= timings.first_token <= timings.finished


def test_a_step_finishes_all_that_run(tiny_path: Path) -> None:
    engine = open_echo(tiny_path, max_running=10)
    engine.add([request(str(i), [1, 2]) for i in range(25)])
    assert [len(engine.step()) for _ in range(4)] == [10, 10, 5, 0]
    assert not engine.has_work
    assert engine.room() == 10


def test_thousands_of_requests_a_second(tiny_path: Path) -> None:
    engine = open_echo(tiny_path)
    started = time.monotonic()
    assert len(list(engine.generate(request(str(i), [7] * 400) for i in range(3000)))) == 3000
    assert time.monotonic() - started < 3


def test_lost_requests_do_not_run(tiny_path: Path) -> None:
    engine = open_echo(tiny_path)
    engine.on_admit = lambda ids: ["a"]
    assert [c.id for c in engine.generate([request("a", [1]), request("b", [1])])] == ["b"]


def test_cancelling_a_running_request_and_a_waiting_one(tiny_path: Path) -> None:
    engine = open_echo(tiny_path, "slow:0.5", max_running=2)
    engine.add([request(id, [1]) for id in ("a", "b", "c")])
    threading.Timer(0.2, engine.cancel, (["a", "c"],)).start()
    done = {c.id: c.finish_reason for c in engine.generate([])}
    assert done == {"a": "cancelled", "b": "length", "c": "cancelled"}


def test_slow_makes_each_step_last(tiny_path: Path) -> None:
    engine = open_echo(tiny_path, "slow:0.1")
    started = time.monotonic()
    list(engine.generate([request("a", [1])]))
    assert time.monotonic() - started >= 0.1


def test_raise_makes_that_request_an_error(tiny_path: Path) -> None:
    engine = open_echo(tiny_path, "raise:bad")
    encode = engine.tokenizer.encode
    done = {
        c.id: c
        for c in engine.generate([request("a", encode("so bad").ids), request("b", encode("good").ids)])
    }
    assert done["a"].error == "RuntimeError: an injected fault"
    assert done["b"].text == "good"


def run_alone(path: Path, fault: str, prompt: str, code: str) -> int:
    """Run code with an engine of a fault and a request in a Python of its own; return its status."""
    start = (
        "import resource, sys\n"
        "from worker.engine import EngineConfig, Request, Sampling\n"
        "from worker.engine.echo import EchoEngine\n"
        f"engine = EchoEngine.open({str(path)!r}, EngineConfig(), faults=[{fault!r}])\n"
        f"asked = Request('a', engine.tokenizer.encode({prompt!r}).ids, Sampling(16))\n"
    )
    return subprocess.run([sys.executable, "-c", start + code], timeout=60).returncode


@pytest.mark.parametrize(("text", "code"), [("the poison", -signal.SIGKILL), ("the cure", 0)])
def test_kill_kills_the_process_that_runs_the_prompt(tiny_path: Path, text: str, code: int) -> None:
    assert run_alone(tiny_path, "kill:poison", text, "list(engine.generate([asked]))") == code


def test_hang_does_not_end_when_the_engine_is_closed(tiny_path: Path) -> None:
    engine = open_echo(tiny_path, "hang:mud")
    engine.add([request("a", engine.tokenizer.encode("mud").ids)])
    stepping = threading.Thread(target=engine.step, daemon=True)
    stepping.start()
    stepping.join(0.3)
    assert engine.running == {"a"}
    engine.close()
    stepping.join(0.3)
    assert stepping.is_alive()


def test_break_raises_out_of_the_step(tiny_path: Path) -> None:
    engine = open_echo(tiny_path, "break:glass")
    engine.add([request("a", engine.tokenizer.encode("glass").ids)])
    with pytest.raises(RuntimeError, match="an injected fault"):
        engine.step()
    assert engine.running == {"a"}


def test_memory_takes_all_there_is(tiny_path: Path) -> None:
    code = (
        "engine.add([asked])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try:\n"
        "    engine.step()\n"
        "except MemoryError:\n"
        "    sys.exit(7)\n"
    )
    assert run_alone(tiny_path, "memory:much", "too much", code) == 7


@pytest.mark.parametrize("fault", ["kill", "kill:", "boom:x", "slow:abc"])
def test_an_unknown_fault_is_refused(tiny_path: Path, fault: str) -> None:
    with pytest.raises(errors.ModelUnavailable):
        open_echo(tiny_path, fault)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.ModelUnavailable, match="no such directory"):
        open_echo(tmp_path / "nothing")


def test_it_needs_no_torch(tiny_path: Path) -> None:
    code = (
        "import sys\n"
        "from worker.engine import EngineConfig\n"
        "from worker.engine.echo import EchoEngine\n"
        f"EchoEngine.open({str(tiny_path)!r}, EngineConfig())\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
