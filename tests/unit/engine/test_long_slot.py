"""Requests that the pool cannot hold: they run alone, their older pages in host memory."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine import exactness
from tests.unit.engine.conftest import request
from tests.unit.engine.exactness import Schedule
from tests.unit.engine.hashing_pages import PAGE_TOKENS
from tests.unit.engine.test_paged_exactness import subject
from tests.unit.engine.test_scheduler import PAGE_BYTES, check, expected, open_paged
from worker.engine import Request, device, loader, long_slot
from worker.engine.fast import FastEngine

_PAGE = 8
_PROMPT = [(7 * i + i // 9) % 250 for i in range(230)]


def watch(engine: FastEngine) -> list[int]:
    """Return a list that gets the number of pieces of each step."""
    pieces: list[int] = []
    pack = engine._stepper.pack

    def packed(batch: Any) -> Any:
        made = pack(batch)
        streamed = made.step.streamed  # type: ignore[union-attr]
        pieces.append(0 if streamed is None else len(streamed.pieces))
        return made

    engine._stepper.pack = packed
    return pieces


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen3"])
@pytest.mark.parametrize(("card", "chunk"), [(5, 64), (6, 3), (24, 64)])
def test_a_context_several_times_the_pool_is_equal_to_generate(
    open_subject: exactness.Open, name: str, card: int, chunk: int
) -> None:
    opened = subject(name, open_subject("llama").loaded.tokenizer)
    host = 400 * opened.runner.layout.token_bytes
    config = {"prefill_chunk_tokens": chunk, "kv_host_bytes": host}
    engine = Schedule(memory_tokens=card * _PAGE, config=config).open(opened)
    pieces = watch(engine)
    prompt = _PROMPT if card > 10 else _PROMPT[:110]
    asked = [
        request("long", prompt, max_tokens=12, ignore_eos=True),
        request("short", prompt[:20], max_tokens=5, ignore_eos=True),
    ]
    done = Schedule().run(engine, asked)
    exactness.check(name, asked, exactness.tokens_of(done))
    assert max(pieces) >= 2
    assert engine.stats.preemptions == 0


class LateCopies(device.Host):
    """Copies beside other work that are done as late as they may be."""

    def beside(self, copies: Callable[[], None]) -> Callable[[], None]:
        return copies


def test_a_piece_may_come_as_late_as_it_is_waited_for(open_subject: exactness.Open) -> None:
    opened = subject("llama", open_subject("llama").loaded.tokenizer)
    config = {"kv_host_bytes": 400 * opened.runner.layout.token_bytes}
    engine = Schedule(memory_tokens=5 * _PAGE, config=config).open(opened)
    assert engine._memory.host is not None  # type: ignore[union-attr]
    engine._memory.host._here = LateCopies()  # type: ignore[union-attr]
    pieces = watch(engine)
    asked = [request("long", _PROMPT[:110], max_tokens=12, ignore_eos=True)]
    exactness.check("llama", asked, exactness.tokens_of(Schedule().run(engine, asked)))
    assert max(pieces) >= 2


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 2)), min_size=1, max_size=5),
    st.integers(4, 20),
    st.sampled_from((0, 3, 10, 30)),
    st.integers(1, 30),
)
@settings(max_examples=100, deadline=None)
def test_what_fits_into_pool_and_host_memory_runs_and_what_does_not_fails(
    tiny_loaded: loader.Loaded, wanted: list[tuple[int, int, int]], card: int, host: int, chunk: int
) -> None:
    engine = open_paged(
        tiny_loaded,
        kv_memory_bytes=card * PAGE_BYTES,
        kv_host_bytes=host * PAGE_BYTES,
        prefill_chunk_tokens=chunk,
    )
    requests = [
        request(str(i), [(j + i) % 3 for j in range(length)], max_tokens=tokens, n=n)
        for i, (length, tokens, n) in enumerate(wanted)
    ]
    most = long_slot.longest(card, host) * PAGE_TOKENS
    for done in engine.generate(requests):
        asked = requests[int(done.id)]
        tokens = len(asked.prompt_ids) + asked.sampling.max_tokens
        if tokens <= most:
            assert {tuple(c.token_ids) for c in done.choices} == {tuple(expected(asked))}
        elif tokens > most + 1:  # the last token needs no KV
            assert "kv_memory_bytes" in str(done.error)
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == engine.stats.kv_host_bytes_in_use == 0


def test_a_request_that_outgrows_the_pool_goes_on(tiny_loaded: loader.Loaded) -> None:
    engine = open_paged(tiny_loaded, kv_memory_bytes=8 * PAGE_BYTES, kv_host_bytes=30 * PAGE_BYTES)
    asked = request("0", [1, 2, 1], max_tokens=70)
    check([asked], list(engine.generate([asked])))


def test_a_window_that_cannot_stay_on_the_device_is_a_misfit(tiny_loaded: loader.Loaded) -> None:
    engine = open_paged(tiny_loaded, kv_memory_bytes=8 * PAGE_BYTES, kv_host_bytes=30 * PAGE_BYTES)
    resident = long_slot.resident_pages(8) * PAGE_TOKENS
    assert engine._memory.host is not None  # type: ignore[union-attr]
    asked = request("0", [1] * 60, max_tokens=4)

    def run(window: int) -> str | None:
        engine._memory.host.windows = [window]  # type: ignore[union-attr]
        (done,) = engine.generate([asked])
        return done.error

    assert run(resident - PAGE_TOKENS) is None
    assert "kv_memory_bytes" in str(run(resident))
    assert run(100) is None, "longer than the request: it hides nothing"


def test_others_wait_and_a_cancelled_one_leaves_nothing(tiny_loaded: loader.Loaded) -> None:
    engine = open_paged(tiny_loaded, kv_memory_bytes=8 * PAGE_BYTES, kv_host_bytes=30 * PAGE_BYTES)
    short: list[Request] = [request(str(i), [i, 1], max_tokens=4) for i in range(3)]
    engine.add([request("long", [1] * 60, max_tokens=30)])
    for _ in range(3):
        engine.step()
    engine.add(short)
    engine.step()
    assert engine.running == {"long"}
    assert engine.stats.kv_host_bytes_in_use > 0
    engine.cancel(["long"])
    done = []
    while engine.has_work:
        done += engine.step()
    check(short, [c for c in done if c.id != "long"])
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == engine.stats.kv_host_bytes_in_use == 0


@pytest.mark.parametrize("host_pages", [0, 1, 2])
def test_a_request_too_long_for_pool_and_host_memory_fails_and_others_run(
    tiny_loaded: loader.Loaded, host_pages: int
) -> None:
    """Less host memory than streaming would take of the pool."""
    fields = {"kv_memory_bytes": 9 * PAGE_BYTES, "kv_host_bytes": host_pages * PAGE_BYTES}
    engine = open_paged(tiny_loaded, **fields)
    engine.add([request("long", [1] * 33, max_tokens=6), request("short", [1] * 6 + [2], max_tokens=3)])
    engine.expects_more = False
    done = {c.id: c for _ in range(40) for c in engine.step()}
    assert "does not fit" in (done["long"].error or "")
    assert done["short"].error is None
    assert not engine.has_work
