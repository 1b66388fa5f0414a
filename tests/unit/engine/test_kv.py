"""Blocks are used again, storages live as long as their references, what can stay is not copied."""

import os
import random
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.engine import hashing
from tests.unit.engine.conftest import request
from worker.engine import EngineConfig, arena, kv, loader, prefix
from worker.engine.arena import Arena, rounded
from worker.engine.fast import FastEngine
from worker.engine.step import Part, Write

# Two layers that differ; keys and values of one of them too.
LAYOUT = kv.Layout(((2, 4, 4), (1, 3, 5)), torch.float64, torch.device("cpu"))


def memory(tokens: int = 1000, zeroed: bool = True) -> kv.Memory:
    return kv.Memory(LAYOUT, tokens * LAYOUT.token_bytes, zeroed)


def used_tokens(memory: kv.Memory) -> float:
    return memory.used / memory.layout.token_bytes


def fill(storage: kv.Storage) -> None:
    """Write numbers that differ by layer, head, token and element."""
    torch.manual_seed(storage.start)
    for layer in range(len(LAYOUT.layers)):
        for tensor in storage.keys_values(layer):
            tensor.copy_(torch.randn(tensor.shape, dtype=torch.float64))


def content(storage: kv.Storage, first: int, tokens: int) -> list[torch.Tensor]:
    return [
        tensor[:, :, first : first + tokens].clone()
        for layer in range(len(LAYOUT.layers))
        for tensor in storage.keys_values(layer)
    ]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each copy has taken."""
    done: list[int] = []
    copy = kv.Storage.copy

    def noted(self: kv.Storage, at: int, source: kv.Storage, first: int, tokens: int) -> None:
        done.append(tokens)
        copy(self, at, source, first, tokens)

    monkeypatch.setattr(kv.Storage, "copy", noted)
    return done


def test_a_freed_block_is_used_again_and_is_no_longer_fresh() -> None:
    arena = Arena(1024)
    first, second = arena.take(100), arena.take(100)
    assert (first, second) == ((0, True), (128, True))
    arena.give_back(0, 100)
    assert arena.take(64) == (0, False)
    assert arena.take(64) == (64, False)
    assert arena.take(64) == (256, True)


@given(st.permutations(range(8)))
def test_free_neighbours_are_one_block_whatever_the_order(order: list[int]) -> None:
    arena = Arena(8 * 64)
    starts = [arena.take(50)[0] for _ in range(8)]
    with pytest.raises(MemoryError, match="64 bytes"):
        arena.take(1)
    for i in order:
        arena.give_back(starts[i], 50)
    assert arena.take(8 * 64) == (0, False)


@given(st.integers(0, 1 << 32))
def test_blocks_never_overlap(seed: int) -> None:
    rng, arena = random.Random(seed), Arena(1 << 14)
    held: dict[int, int] = {}
    for _ in range(200):
        if held and rng.random() < 0.5:
            start = rng.choice(sorted(held))
            arena.give_back(start, held.pop(start))
        else:
            try:
                size = rng.randint(1, 1000)
                held[arena.take(size)[0]] = size
            except MemoryError:
                continue
        ends = [(start, start + rounded(size)) for start, size in sorted(held.items())]
        assert all(a[1] <= b[0] for a, b in pairwise(ends))
    for start, size in held.items():
        arena.give_back(start, size)
    assert arena.take(1 << 14)[0] == 0


def test_a_storage_is_given_back_with_its_last_reference() -> None:
    m = memory()
    storage = m.storage(40)
    storage.retain()
    storage.release()
    assert used_tokens(m) == 40
    storage.release()
    assert m.used == 0
    assert m.storage(40).row == storage.row


def test_addresses_are_those_of_the_views() -> None:
    m = memory()
    m.storage(5)
    storage = m.storage(7)
    address, capacity = storage.row
    for layer, offsets in enumerate(LAYOUT.offsets.tolist()):
        for tensor, offset in zip(storage.keys_values(layer), offsets, strict=True):
            assert tensor.data_ptr() == address + offset * capacity * 8
            assert tensor.is_contiguous()


def test_memory_that_is_used_again_is_zero_where_that_is_asked_for() -> None:
    for zeroed in (True, False):
        m = memory(zeroed=zeroed)
        storage = m.storage(8)
        fill(storage)
        storage.release()
        again = content(m.storage(8), 0, 8)
        assert all(not x.any() for x in again) == zeroed


def test_memory_in_pieces_is_no_reason_to_fail(caplog: pytest.LogCaptureFixture) -> None:
    m = memory()
    m._arena.take(m._flat.nbytes)
    storage = m.storage(8)
    fill(storage)
    assert "in pieces" in caplog.text
    assert used_tokens(m) == 8
    storage.release()
    assert m.used == 0


def test_a_copy_takes_the_tokens_of_all_layers() -> None:
    m = memory()
    source, target = m.storage(12), m.storage(20)
    fill(source)
    target.copy(9, source, 4, 6)
    assert equal(content(target, 9, 6), content(source, 4, 6))
    assert all(not x.any() for first, n in ((0, 9), (15, 5)) for x in content(target, first, n))


def test_a_full_slot_moves_to_a_larger_one() -> None:
    m = memory()
    slot = m.slot(20)
    fill(slot.storage)
    slot.length = 32
    before = content(slot.storage, 0, 32)
    moved = slot.grown()
    assert (moved.capacity, moved.length, used_tokens(m)) == (48, 32, 48)
    assert equal(content(moved.storage, 0, 32), before)


def test_the_largest_number_of_tokens_that_fit_is_the_budget() -> None:
    m = memory(100)
    slot = m.slot(40)
    assert m.fits(52)
    assert not m.fits(53)
    slot.release()
    assert m.fits(100)


def test_a_split_copies_nothing_and_frees_with_the_last_part(copies: list[int]) -> None:
    m = memory()
    run = m.run(0, 10)
    fill(run.storage)
    upper, lower = run.split(4)
    assert upper.storage is lower.storage is run.storage
    assert [(r.first, r.tokens, r.loose) for r in (upper, lower)] == [(0, 4, True), (4, 6, True)]
    assert copies == []
    upper.release()
    assert used_tokens(m) == 10
    lower.release()
    assert m.used == 0


def test_the_run_of_a_slot_outlives_it() -> None:
    m = memory()
    slot = m.slot(30)
    run = slot.run(5, 20)
    slot.release()
    assert used_tokens(m) == 32
    run.release()
    assert m.used == 0


def test_evicting_one_of_two_nodes_of_a_storage_frees_nothing_until_the_other_goes() -> None:
    m, trie = memory(), prefix.Trie()
    node = trie.insert("", list(range(10)))
    trie.pin(node)
    node.kv, node.computed = m.run(0, 10), 10
    other = trie.insert("", [0, 1, 2, 3, 77])
    trie.pin(other)
    trie.unpin(other)
    trie.unpin(node)
    assert trie.evict()
    assert used_tokens(m) == 10
    assert trie.evict()
    assert m.used == 0
    assert not trie.evict()


def test_neighbours_of_one_capacity_are_one_stack() -> None:
    m = memory()
    storages = [m.storage(capacity) for capacity in (32, 32, 32, 48, 32, 48, 48)]
    in_order = sorted(storages, key=lambda s: (s.capacity, s.start))
    assert kv.stacks(in_order) == [slice(0, 3), slice(3, 4), slice(4, 6), slice(6, 7)]
    for stack in kv.stacks(in_order):
        for layer in range(len(LAYOUT.layers)):
            for storage in in_order:
                fill(storage)
            both = [
                torch.cat(side) for side in zip(*(s.keys_values(layer) for s in in_order[stack]), strict=True)
            ]
            assert equal(list(kv.stacked(in_order[stack], layer)), both)


@given(st.lists(st.tuples(st.sampled_from((32, 48)), st.booleans()), min_size=1, max_size=12))
def test_a_batched_part_in_pieces_reads_what_was_written(plan: list[tuple[int, bool]]) -> None:
    m = memory(5000, zeroed=False)
    storages = [m.storage(capacity) for capacity, _ in plan]
    kept = [s for s, (_, keeps) in zip(storages, plan, strict=True) if keeps] or storages[:1]
    kept.sort(key=lambda s: (s.capacity, s.start))
    lengths = [i % 32 + 1 for i in range(len(kept))]
    n, tokens = len(kept), slice(0, len(kept))
    new = torch.randn(n, 2, 4, dtype=torch.float64)
    Write(tokens, kept, at=torch.tensor(lengths) - 1).put(0, new, -new)
    part = Part(tokens, kept, 0, max(lengths), torch.zeros(n), torch.tensor(lengths) - 1, lengths)
    seen = 0
    for piece in part.pieces():
        assert isinstance(piece.tokens, slice)
        assert piece.tokens.start == seen
        keys, values = piece.keys_values(0)
        for i, at in enumerate(piece.lengths):
            assert torch.equal(keys[i, :, at - 1], new[seen + i])
            assert torch.equal(values[i, :, at - 1], -new[seen + i])
        seen = piece.tokens.stop
    assert seen == n


def open_hashing(tiny_loaded: loader.Loaded, **fields: int) -> FastEngine:
    loaded = replace(tiny_loaded, vocabulary=hashing.VOCABULARY, eos_ids=frozenset())
    return FastEngine(loaded, EngineConfig(**fields), hashing.HashRunner())


@pytest.mark.parametrize(("prompt", "copied"), [(30, []), (3, [3, 7])])
def test_a_finished_request_leaves_its_storage_unless_it_is_mostly_padding(
    tiny_loaded: loader.Loaded, copies: list[int], prompt: int, copied: list[int]
) -> None:
    engine = open_hashing(tiny_loaded)
    engine.add([request("a", [5] * prompt, max_tokens=8)])
    engine.step()
    [sequence] = engine._scheduler.running
    assert sequence.slot is not None
    slot = sequence.slot.storage
    while engine.has_work:
        engine.step()
    node = engine._scheduler.trie.insert("", sequence.tokens[: sequence.computed])
    assert node.kv is not None
    assert (node.kv.storage.row == slot.row) == (copied == [])
    assert copies == copied
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


def test_kv_in_a_storage_that_leaves_no_room_is_computed_again(tiny_loaded: loader.Loaded) -> None:
    tokens = 70  # a slot of 48, or two of 32
    engine = open_hashing(tiny_loaded, kv_memory_bytes=tokens * hashing.HashRunner().layout.token_bytes)
    first = request("first", [1] * 8 + [2] * 32, max_tokens=4)
    other = request("other", [1] * 8 + [3] * 20, max_tokens=4)
    for each in (first, other):
        [done] = engine.generate([each])
        assert done.error is None
        expected = list(each.prompt_ids)
        for _ in range(4):
            expected.append(hashing.next_token(expected))
        assert done.token_ids == expected[-4:]
    engine.forget_prefixes()
    assert engine.stats.kv_bytes_in_use == 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_touched_ahead_only_while_idle() -> None:
    idle = threading.Event()
    flat, stopped = arena.pages(64 << 20), threading.Event()
    before = resident_bytes()
    thread = threading.Thread(target=arena.touch, args=(flat, flat.nbytes, idle.is_set, stopped))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert resident_bytes() - before < 16 << 20
    idle.set()
    thread.join(20)
    assert not thread.is_alive()
    if int(os.uname().release.split(".")[0]) >= 6:  # older kernels may not do it
        assert resident_bytes() - before > 48 << 20
    assert not bool(flat.any())


def test_touching_ends_when_the_engine_does() -> None:
    stopped = threading.Event()
    flat = arena.pages(1 << 20)
    thread = threading.Thread(target=arena.touch, args=(flat, flat.nbytes, lambda: False, stopped))
    thread.start()
    stopped.set()
    thread.join(5)
    assert not thread.is_alive()
