"""Tokens a second of quantised weights, of those of 32 bits and of peers, by the number of requests at once.

Each engine has a process of its own, and in turn they run the same prompts, which none has seen before.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.children import OURS, Child, ChildFailed, interpreter
from bench.engine import Source
from bench.figures import Inputs
from bench.int4_subjects import Subject
from worker.engine import smollm2

BATCH_SIZES = (1, 8, 64)
_PROMPT_TOKENS, _OUTPUT_TOKENS, _WARM_UP_TOKENS = 32, 64, 4
_KV_GIB = 1
_SETTLING_SECONDS = 10
"""An engine that was just loaded takes its memory from the system, and would slow the others down."""
Rates = dict[str, float]
"""Output tokens a second by batch size."""


@dataclass(frozen=True)
class Peer:
    """An engine of others: what it is called in bench/peers, and in what weights it runs the model."""

    engine: str
    weights: str | None
    reads_gguf: bool = False


PEERS = {
    "openvino-int4": Peer("openvino", "int4"),
    "openvino-int8": Peer("openvino", "int8"),
    "llamacpp-q4_1": Peer("llamacpp", None, reads_gguf=True),
    "llamacpp-q4_0": Peer("llamacpp", "q4_0", reads_gguf=True),
    "llamacpp-q8_0": Peer("llamacpp", "q8_0", reads_gguf=True),
}


def installed(with_gguf: bool = True) -> list[str]:
    """Return the peers that are installed; say on stderr which are not. Some need the model as GGUF."""
    found = []
    for name, peer in PEERS.items():
        if peer.reads_gguf and not with_gguf:
            print(f"without {name}: the model is no GGUF file", file=sys.stderr, flush=True)
            continue
        try:
            interpreter(peer.engine)
            found.append(name)
        except ChildFailed as error:
            print(f"without {name}: {error}", file=sys.stderr, flush=True)
    return found


def measure(
    found: Subject, source: str, peers: Sequence[str], repeats: int, threads: int
) -> dict[str, Rates | dict[str, Rates]]:
    """Return the rates of a subject, of the float32 model and of peers; raises ChildFailed."""
    inputs = Source.read(Path(source)).inputs(0)
    ours = [
        Child(OURS, Path(where), threads, label, settings=settings, kv_gib=_KV_GIB)
        for label, where, settings in (
            ("longhaul-ints", found.source, found.settings),
            ("longhaul-fp32", source, {}),
        )
    ]
    children = [*ours, *(child(name, source, threads) for name in peers)]
    with ExitStack() as stack:
        engines = [stack.enter_context(child) for child in children]
        time.sleep(_SETTLING_SECONDS)
        mine, full, *others = by_batch_size(engines, inputs, repeats)
    rates: dict[str, Any] = {"tokens_per_second": mine, "fp32_tokens_per_second": full}
    return rates | ({"peer_tokens_per_second": dict(zip(peers, others, strict=True))} if peers else {})


def by_batch_size(engines: Sequence[Child], inputs: Inputs, repeats: int) -> list[Rates]:
    """Return the medians of each engine, over runs that alternate."""
    rates: list[Rates] = [{} for _ in engines]
    for size in BATCH_SIZES:
        for which, found in enumerate(_runs(engines, inputs, size, repeats)):
            rates[which][str(size)] = round(statistics.median(found), 1)
    return rates


def _runs(engines: Sequence[Child], inputs: Inputs, size: int, repeats: int) -> list[list[float]]:
    cut = inputs.cutter()
    prompts = [cut(_PROMPT_TOKENS) for _ in range(size)]
    few = inputs.fresh([(prompt, _WARM_UP_TOKENS) for prompt in prompts])
    for engine in engines:
        engine.run(few)
    rates: list[list[float]] = [[] for _ in engines]
    for turn in range(repeats):
        work = inputs.fresh([(prompt, _OUTPUT_TOKENS) for prompt in prompts])
        order = range(len(engines))
        for which in reversed(order) if turn % 2 else order:
            done = engines[which].run(work)
            rates[which].append(done.output_tokens / done.seconds)
    return rates


def child(name: str, source: str, threads: int) -> Child:
    """Return a peer's process, which is still to be entered."""
    peer = PEERS[name]
    model = smollm2.wheel_gguf() if peer.reads_gguf else Path(source)
    more = {"weights": peer.weights} if peer.weights else {}
    return Child(peer.engine, model, threads, name, kv_gib=_KV_GIB, **more)
