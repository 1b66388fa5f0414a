"""Workloads and limit: what is promised, and that they are those of the shared reference."""

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from bench import limit, workloads

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "bench"
CONFIG = SimpleNamespace(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
)


class Bytes:
    """A tokenizer: one token a byte."""

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode()[:200_000])}


def reference(name: str) -> ModuleType:
    path = REFERENCE / f"{name}.py"
    if not path.is_file():
        pytest.skip("the shared reference is not beside this checkout")
    spec = importlib.util.spec_from_file_location(f"reference_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up_seconds(rows: int, shapes: list[tuple[int, int, int]], *_: object) -> float:
    """A machine that does 1e11 flops a second and needs 1 us to begin."""
    return sum(times * (1e-6 + 2 * rows * inputs * outputs / 1e11) for inputs, outputs, times in shapes)


@pytest.mark.parametrize(("n", "seed"), [(64, 0), (9, 5), (1, 1)])
def test_the_workloads_are_those_of_the_reference(n: int, seed: int) -> None:
    assert workloads.build(Bytes(), n, seed) == reference("workloads").build(Bytes(), n, seed)


@pytest.mark.parametrize("head_dim", [None, 64])
@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_limit_is_that_of_the_reference(
    name: str, head_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = reference("limit")
    monkeypatch.setattr(shared, "_packed_seconds", made_up_seconds)
    config = SimpleNamespace(**vars(CONFIG), **({"head_dim": head_dim} if head_dim else {}))
    work = workloads.build(Bytes(), 20, 3)[name]
    wanted = shared.seconds(config, work)
    found = limit.estimate(config, work, made_up_seconds)
    assert found.seconds == pytest.approx(wanted["seconds"])
    assert found.prefill_tokens == wanted["prefill_tokens"]
    assert found.decode_steps == wanted["decode_steps"]


def test_distinct_tokens_are_the_nodes_of_the_token_trie() -> None:
    rng = random.Random(0)
    for _ in range(200):
        prompts = [[rng.randrange(3) for _ in range(rng.randrange(8))] for _ in range(rng.randrange(12))]
        assert limit.distinct_tokens(prompts) == len(set(prefixes(prompts)))


def prefixes(prompts: list[list[int]]) -> Iterator[tuple[int, ...]]:
    for prompt in prompts:
        yield from (tuple(prompt[: end + 1]) for end in range(len(prompt)))


@pytest.mark.parametrize("name", workloads.NAMES)
def test_a_workload_set_apart_shares_within_itself_and_with_no_other(name: str) -> None:
    work = workloads.build(Bytes(), 16, 0)[name]
    taken: set[int] = set()
    runs = [workloads.apart(work, taken, range(256, 1000)) for _ in range(3)]
    alone = limit.distinct_tokens(prompt for prompt, _ in work)
    assert [limit.distinct_tokens(prompt for prompt, _ in run) for run in runs] == [alone] * 3
    assert limit.distinct_tokens(prompt for run in runs for prompt, _ in run) == 3 * alone
    assert [output for _, output in runs[2]] == [output for _, output in work]


def test_too_small_a_vocabulary_cannot_set_workloads_apart() -> None:
    with pytest.raises(ValueError, match="too few unused tokens for 2"):
        workloads.apart([([1, 2], 4), ([3], 4)], set(), [7])


def test_a_packed_product_takes_time() -> None:
    pytest.importorskip("torch")
    assert limit.packed_seconds(8, [(16, 32, 2)]) > 0
