"""How a card's memory is divided: weights, the largest step, recorded steps, a rest, and pages of KV.

Pure arithmetic. A plan takes what a model needs from its config (footprint); an engine on a card takes what
it has measured after loading. Both are divided by the same functions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.engine import graph_shapes, graphs, long_slot
from worker.engine.footprint import Footprint
from worker.engine.pages import PAGE_TOKENS

_CONTEXT_BYTES = 600_000_000
"""What CUDA and its libraries take of a card before anything is loaded; a guess, which only plans need."""
_SPARE_BYTES = 512 << 20
_SPARE_SHARE = 0.02
"""Left free: memory in pieces, workspaces of libraries, one page for padding."""
_GRAPH_BYTES = 12_000_000
"""What a recorded step takes besides its logits; a guess, which bounds how many are recorded."""
_WIDTHS = 2
"""A batch size is recorded again when tables double: so many times while most requests run."""
_INT4_BYTES = 0.5 + 4 / 64
"""Of a weight in INT4: half a byte, and a scale and a minimum for each 64."""


class DoesNotFit(ValueError):
    """Why there is no memory left for KV, and what would help."""


@dataclass(frozen=True)
class Settings:
    """What divides a card's memory besides what was measured: the bytes recorded steps may take, and those
    that KV shall have (None: all that is left).
    """

    graph_bytes: int = 0
    kv_memory_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """How a card of `memory` bytes is used, and what that holds. `requests` have `context` tokens each.

    `longest` is the longest request that the pool holds, `longest_with_host` that of pool and host memory,
    less the pages of the pool through which the older ones are read.
    """

    memory: int
    weight_bytes: int
    step_bytes: int
    graph_bytes: int
    other_bytes: int
    kv_bytes: int
    page_bytes: int
    pages: int
    host_pages: int
    context: int
    requests: int
    longest: int
    longest_with_host: int
    graph_sizes: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_TOKENS


def plan(
    need: Footprint,
    memory: int,
    context: int,
    max_running: int,
    host_bytes: int = 0,
    kv_memory_bytes: int | None = None,
    cuda_graphs: bool = True,
) -> Plan:
    """Return how a card of `memory` bytes would be used; raises DoesNotFit that says what would fit."""
    sizes = graph_sizes(max_running) if cuda_graphs else ()
    graphs = graph_bytes(sizes, need.decode_bytes, need.vocabulary * need.dtype.itemsize)
    settings = Settings(graphs, kv_memory_bytes)
    free = memory - _CONTEXT_BYTES
    if free <= 0:
        raise DoesNotFit(f"less than what CUDA itself takes of a card, about {in_gb(_CONTEXT_BYTES)}")
    try:
        left = kv_bytes_after_profile(free, free - need.weight_bytes, need.step_bytes, memory, settings)
        page = need.token_bytes * PAGE_TOKENS
        if left < page:
            raise DoesNotFit(f"{in_gb(left)} are left for KV, less than a page of {in_gb(page)}")
    except DoesNotFit as error:
        raise DoesNotFit(f"{error}{advice(need, memory, settings)}") from None
    pages, host_pages = left // page, host_bytes // page
    return Plan(
        memory=memory,
        weight_bytes=need.weight_bytes,
        step_bytes=need.step_bytes,
        graph_bytes=settings.graph_bytes,
        other_bytes=_CONTEXT_BYTES + spare_bytes(memory),
        kv_bytes=left,
        page_bytes=page,
        pages=pages,
        host_pages=host_pages,
        context=context,
        requests=pages // -(-context // PAGE_TOKENS),
        longest=min(pages * PAGE_TOKENS, need.context_tokens),
        longest_with_host=min(long_slot.longest(pages, host_pages) * PAGE_TOKENS, need.context_tokens),
        graph_sizes=sizes,
    )


def kv_bytes_after_profile(
    free_before: int, free_after: int, peak: int, total: int, settings: Settings
) -> int:
    """Return the bytes for KV on a card of `total` bytes; raises DoesNotFit.

    `free_before` and `free_after` are what was free before and after loading the model, `peak` what the
    largest step held besides the weights. What other processes hold counts as gone.
    """
    spare = spare_bytes(total)
    left = free_after - peak - settings.graph_bytes - spare
    parts = (
        f"of {in_gb(free_before)} the weights take {in_gb(free_before - free_after)}, the largest step"
        f" {in_gb(peak)}, graphs {in_gb(settings.graph_bytes)}; {in_gb(spare)} stay free"
    )
    if left <= 0:
        raise DoesNotFit(f"nothing is left for KV: {parts}")
    wanted = settings.kv_memory_bytes
    if wanted is not None and wanted > left:
        raise DoesNotFit(f"kv_memory_bytes asks for {in_gb(wanted)}, but {in_gb(left)} are left: {parts}")
    return left if wanted is None else wanted


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """Return the batch sizes that decode steps are padded to, up to the one for `max_running`."""
    return tuple(sorted({graph_shapes.rows_for(rows) for rows in range(1, max_running + 1)}))


def graph_bytes(sizes: tuple[int, ...], decode_bytes: int, row_bytes: int) -> int:
    """Return what recorded steps may take: one pool for what they compute, and the logits of each, of which a
    row has `row_bytes`.
    """
    if not sizes:
        return 0
    logits = sum(sizes) * row_bytes
    return decode_bytes + _WIDTHS * (logits + len(sizes) * _GRAPH_BYTES)


def graph_limits(max_running: int, size: int) -> graphs.Limits:
    """Return how many decode steps an engine may record in so many bytes."""
    return graphs.Limits(_WIDTHS * len(graph_sizes(max_running)), size)


def spare_bytes(total: int) -> int:
    return _SPARE_BYTES + int(total * _SPARE_SHARE)


def measured_peak(run_largest_step: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that a step holds on a card besides what was there before it. Waits for the device."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def in_gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if abs(size) >= 1e8 else f"{size / 1e6:.1f} MB"


def advice(need: Footprint, memory: int, settings: Settings) -> str:
    """Return which smaller weights, or share of them, would leave something for KV; empty if none."""
    page = need.token_bytes * PAGE_TOKENS
    taken = _CONTEXT_BYTES + need.step_bytes + settings.graph_bytes + spare_bytes(memory)
    room = memory - taken - (settings.kv_memory_bytes or page)
    found = []
    if (
        need.dtype.itemsize > 2
        and not need.quantized
        and need.weight_bytes * 2 // need.dtype.itemsize <= room
    ):
        found.append("bfloat16")
    heads = [layer_heads for layer_heads, _, _ in need.layout.layers]
    whole = need.weight_bytes * need.tensor_parallel
    for cards in (2, 4, 8, 16):
        divides = cards > need.tensor_parallel and not any(count % cards for count in heads)
        if divides and whole // cards <= room:
            found.append(f"tensor parallel over {cards} such cards")
            break
    saved = need.products * (need.dtype.itemsize - _INT4_BYTES) / need.tensor_parallel
    if not need.quantized and need.weight_bytes - saved <= room:
        found.append(f"INT4 weights ({in_gb(need.weight_bytes - saved)})")
    return f". What fits: {', '.join(found)}" if found else ""
