"""Peers of the benchmarks compute what we do: where they are installed (`make bench-peers`)."""

import pytest

from bench import int4_speed
from bench.children import OURS, Child, ChildFailed, interpreter
from bench.engine import Source
from worker.engine import smollm2

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 6, 32, 4
_SHARE = 0.6
"""Of tokens that are the same: they round as they like."""


@pytest.fixture(scope="module")
def workload() -> list[tuple[list[int], int]]:
    cut = Source.read(smollm2.ensure()).inputs(0).cutter()
    return [(cut(_PROMPT_TOKENS + 8 * i), _OUTPUT_TOKENS) for i in range(_REQUESTS)]


@pytest.fixture(scope="module")
def ours(workload: list[tuple[list[int], int]]) -> list[list[int]]:
    with Child(OURS, smollm2.ensure(), 1, kv_gib=1) as engine:
        return engine.run(workload).outputs


@pytest.mark.parametrize("name", ["openvino-int8", "llamacpp-q4_1", "llamacpp-q8_0"])
def test_a_peer_says_what_we_say(
    name: str, workload: list[tuple[list[int], int]], ours: list[list[int]]
) -> None:
    with _installed(name) as peer:
        assert _same(peer.run(workload).outputs, ours) >= _SHARE


def test_sequences_of_llama_cpp_do_not_mix(workload: list[tuple[list[int], int]]) -> None:
    with _installed("llamacpp-q8_0") as peer:
        together = peer.run(workload).outputs
        alone = [peer.run([request]).outputs[0] for request in workload]
        assert _same(together, alone) >= _SHARE


def _installed(name: str) -> Child:
    try:
        interpreter(int4_speed.PEERS[name].engine)
    except ChildFailed as error:
        pytest.skip(str(error))
    return int4_speed.child(name, str(smollm2.ensure()), 1)


def _same(ours: list[list[int]], theirs: list[list[int]]) -> float:
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)
