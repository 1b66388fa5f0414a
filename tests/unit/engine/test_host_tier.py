"""KV that goes to host memory and comes back: any schedule is exact, budgets are kept, nothing stays."""

import gc
import weakref
from random import Random
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.engine.conftest import request
from tests.unit.engine.late_device import LateDevice
from tests.unit.engine.test_scheduler import (
    PAGE_BYTES,
    check,
    distinct_tokens,
    expected,
    open_paged,
    requests_of,
)
from worker.engine import Request, device, host_tier, kv, loader, pages, prefix

LAYOUT = kv.Layout(((1, 2, 2), (2, 4, 4)), torch.float64, torch.device("cpu"))


@given(requests_of(), st.integers(9, 30), st.integers(1, 30), st.integers(1, 9), st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_adding_cancelling_forgetting_and_little_memory_change_no_output(
    tiny_loaded: loader.Loaded, requests: list[Request], card: int, host: int, chunk: int, seed: int
) -> None:
    rng = Random(seed)
    engine = open_paged(
        tiny_loaded,
        prefill_chunk_tokens=chunk,
        max_running=rng.choice([1, 2, 5]),
        kv_memory_bytes=card * PAGE_BYTES,
        kv_host_bytes=host * PAGE_BYTES,
    )
    outputs = rng.choice([None, 1, 4])
    if outputs is not None:
        engine._scheduler._lengths.expected = lambda job, most: outputs  # type: ignore[method-assign]
    todo, done = list(requests), []
    while todo or engine.has_work:
        count = rng.randint(0, 4)
        engine.add(todo[:count])
        todo = todo[count:]
        known = sorted({*engine.running, *engine.waiting})
        if known and rng.random() < 0.1:
            engine.cancel([rng.choice(known)])
        if rng.random() < 0.05:
            engine.forget_prefixes()
        done += engine.step()
        assert engine.stats.kv_bytes_in_use <= card * PAGE_BYTES
        assert engine.stats.kv_host_bytes_in_use <= host * PAGE_BYTES
    finished = [c for c in done if c.finish_reason != "cancelled"]
    check([r for r in requests if r.id in {c.id for c in finished}], finished)
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == engine.stats.kv_host_bytes_in_use == 0


@given(requests_of(), st.integers(14, 24), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_with_host_memory_for_all_a_small_pool_computes_each_prefix_once(
    tiny_loaded: loader.Loaded, requests: list[Request], card: int, chunk: int, running: int
) -> None:
    engine = open_paged(
        tiny_loaded,
        prefill_chunk_tokens=chunk,
        max_running=running,
        kv_memory_bytes=card * PAGE_BYTES,
        kv_host_bytes=500 * PAGE_BYTES,
    )
    engine._scheduler._lengths.expected = lambda job, most: most  # type: ignore[method-assign]
    done = list(engine.generate(requests))
    check(requests, done)
    stats = engine.stats
    assert stats.preemptions == stats.kv_host_evictions == 0
    assert stats.prefill_tokens_computed <= distinct_tokens([r.prompt_ids for r in requests])
    cached = sum(len(r.prompt_ids) for r in requests) - stats.prefill_tokens_computed
    assert sum(c.cached_tokens or 0 for c in done) == cached == stats.prefix_tokens_reused


def test_prompts_that_take_turns_come_back_from_host_memory(tiny_loaded: loader.Loaded) -> None:
    engine = open_paged(tiny_loaded, kv_memory_bytes=9 * PAGE_BYTES, kv_host_bytes=20 * PAGE_BYTES)
    prompts = [[1] * 22, [2] * 22]
    computed, cached = [], []
    for turn in range(6):
        before = engine.stats.prefill_tokens_computed
        asked = request(str(turn), prompts[turn % 2], max_tokens=3)
        (done,) = engine.generate([asked])
        assert done.token_ids == expected(asked)
        computed.append(engine.stats.prefill_tokens_computed - before)
        cached.append(done.cached_tokens)
    assert computed == [22, 22, 1, 1, 1, 1]
    assert cached == [0, 0, 21, 21, 21, 21]
    assert engine.stats.prefix_tokens_restored >= 4 * 21


def test_host_memory_keeps_what_was_used_last(tiny_loaded: loader.Loaded) -> None:
    """The pool holds one of three prompts and host memory one more."""
    engine = open_paged(tiny_loaded, kv_memory_bytes=9 * PAGE_BYTES, kv_host_bytes=8 * PAGE_BYTES)

    def computed(token: int) -> int:
        before = engine.stats.prefill_tokens_computed
        list(engine.generate([request("0", [token] * 22, max_tokens=3)]))
        return engine.stats.prefill_tokens_computed - before

    assert [computed(token) for token in (1, 2, 3, 2, 1)] == [22, 22, 22, 1, 22]
    assert engine.stats.kv_host_evictions > 0


def test_what_waiting_requests_need_makes_no_room(tiny_loaded: loader.Loaded) -> None:
    engine = open_paged(
        tiny_loaded, max_running=1, kv_memory_bytes=9 * PAGE_BYTES, kv_host_bytes=6 * PAGE_BYTES
    )
    first = [request(str(i), [7] * 20 + [i], max_tokens=2) for i in range(2)]
    between = request("between", [3] * 22, max_tokens=9)
    engine.add([first[0], between, first[1]])
    scheduler = engine._scheduler
    scheduler.waiting.sort(key=lambda s: (s.row.id == "1", s.row.id == "between"))
    done = []
    while engine.has_work:
        done += engine.step()
    check([*first, between], done)
    assert engine.stats.prefill_tokens_computed == 20 + 2 + 22


def test_a_prefix_is_forgotten_in_host_memory_too(tiny_loaded: loader.Loaded) -> None:
    engine = open_paged(
        tiny_loaded,
        kv_memory_bytes=9 * PAGE_BYTES,
        kv_host_bytes=20 * PAGE_BYTES,
        prefix_ttl_seconds=0.0,
    )
    now = 0.0
    engine._clock = engine._scheduler.trie._clock = lambda: now
    for token in (1, 2):
        list(engine.generate([request("0", [token] * 22, max_tokens=3)]))
    assert engine.stats.kv_host_bytes_in_use > 0
    now = 1.0
    list(engine.generate([request("0", [3], max_tokens=1)]))
    assert engine.stats.kv_host_bytes_in_use == 0


def test_pages_come_back_as_they_went() -> None:
    memory = pages.Memory(LAYOUT, 60 * 4 * LAYOUT.token_bytes, page_tokens=4)
    for layer in memory.pool.tensors:
        layer.copy_(torch.randn(layer.shape, dtype=layer.dtype))
    tier = host_tier.HostTier(memory, 100 * memory.page_bytes, device.Host())
    tier.release(tier.take(3)[1:2])  # what is free does not begin side by side
    run = memory.run(2, 4 * 50)
    before = [layer[run.pages].clone() for layer in memory.pool.tensors]
    kept = tier.store(run, run.tokens)
    for layer in memory.pool.tensors:
        layer.zero_()
    run.release()
    memory.take(3)
    other = memory.run(2, 4 * 50)
    assert other.pages != run.pages
    tier.restore(kept, other, other.tokens)
    kept.release()
    for layer, was in zip(memory.pool.tensors, before, strict=True):
        assert torch.equal(layer[other.pages], was)
    assert tier.used == 2 * tier.page_bytes


def test_moves_are_in_order_on_a_device_that_does_everything_late() -> None:
    """Pages are taken by others, on both sides, before the copies from them have begun."""
    late = LateDevice()
    memory = pages.Memory(LAYOUT, 2 * 4 * LAYOUT.token_bytes, page_tokens=4)
    tier = host_tier.HostTier(memory, 4 * memory.page_bytes, late)
    kept = {}
    fetched = []

    def compute(value: int) -> None:
        run = memory.run(0, 8)
        for layer in memory.pool.tensors:
            layer[late.stage(np.array(run.pages))] = float(value)
        kept[value] = tier.store(run, 8)
        run.release()

    def restore(value: int) -> None:
        run = memory.run(0, 8)
        tier.restore(kept[value], run, 8)
        kept.pop(value).release()
        fetched.append(late.fetch(memory.pool.values[1][late.stage(np.array(run.pages))]))
        run.release()

    with late:
        compute(1)
        compute(2)
        restore(1)
        compute(3)  # where 1 was
        restore(2)
        restore(3)
    assert ("wait", 0) not in late.events
    assert [np.unique(fetch.wait()).tolist() for fetch in fetched] == [[1], [2], [3]]


def test_what_a_step_has_yet_to_compute_is_not_kept() -> None:
    memory = pages.Memory(LAYOUT, 10 * 4 * LAYOUT.token_bytes, page_tokens=4)
    tier = host_tier.HostTier(memory, 10 * memory.page_bytes, device.Host())
    trie = prefix.Trie(host=tier)
    node = trie.insert("", list(range(20)))
    trie.pin(node)
    node.kv, node.computed = memory.run(0, 20), 12
    trie.in_step = [(node, 9)]
    upper = trie.split(node, 6)
    assert trie.reclaim(set())
    assert trie.reclaim(set())
    assert [each.host.tokens if each.host else 0 for each in (upper, node)] == [6, 3]
    assert trie.split(node, 5).host is not None
    assert node.host is None
    trie.unpin(node)
    trie.clear()
    assert tier.used == memory.used == 0


def test_host_memory_is_held_as_long_as_its_pages_are() -> None:
    lost = []

    class Noting(device.Host):
        def pinned(self, size: int) -> torch.Tensor:
            memory = super().pinned(size)
            weakref.finalize(memory, lost.append, size)
            return memory

    memory = pages.Memory(LAYOUT, 10 * 4 * LAYOUT.token_bytes, page_tokens=4)
    tier = host_tier.HostTier(memory, 7 * memory.page_bytes, Noting())
    move = tier.mover
    gc.collect()
    assert not lost
    del tier
    move(True, [1], [6])
    assert not lost
    del move
    gc.collect()
    assert lost == [7 * memory.page_bytes]


class _Allocations(TorchDispatchMode):
    """Notes the operations that return new memory of more than a few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)
        }
        if _is_tensor(result) and result.untyped_storage().data_ptr() not in known and result.numel() > 64:
            self.found.append(str(operation))
        return result


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def test_a_move_takes_no_memory_that_could_be_short() -> None:
    layout = kv.Layout(((2, 8, 8),) * 2, torch.float32, torch.device("cpu"))
    pool, here = pages.Pool(layout, 70, 4), device.Host()
    host = host_tier.host_pool(pool, 70, here)
    move = host_tier.mover(pool, host, here)
    pool.keys[1].normal_()
    before = pool.keys[1].clone()
    with _Allocations() as allocations:
        move(True, [3, 9, 4], [8, 9, 20])
        move(False, [40, 41, 42], [9, 8, 20])
    assert allocations.found == []
    assert torch.equal(pool.keys[1][40:43], before[[9, 3, 4]])


def test_a_split_leaves_no_node_without_kv() -> None:
    """Of a node that host memory has in part."""
    trie = prefix.Trie()
    node = trie.insert("", [1, 2, 3, 4])
    layout = kv.Layout(((1, 1, 1),), torch.float32, torch.device("cpu"))
    node.host = pages.Memory(layout, 1 << 12, 4).run(0, 2)
    node.kv = None
    assert trie.insert("", [1, 2]).children == {}
