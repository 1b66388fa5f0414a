"""Draws follow the distribution that the parameters ask for, and depend on seed and position alone: by the
compiled kernels, and by torch's operations.
"""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.engine.conftest import native_or_skip
from worker.engine import Sampling, sampling, seeds
from worker.engine.native import library

ROWS = [
    Sampling(1, temperature=1.0),
    Sampling(1, temperature=0.7, top_p=0.9),
    Sampling(1, temperature=1.3, top_k=5),
    Sampling(1, temperature=1.0, min_p=0.2),
    Sampling(1, temperature=0.5, top_p=0.5, top_k=20, min_p=0.05),
    Sampling(1, temperature=2.0, top_p=0.999, top_k=4000),
    Sampling(1, temperature=1.0, top_p=1e-9),
    Sampling(1, temperature=1.0, top_k=10**6),
]

# Equal ones among them, at the edges of the truncations too.
LOGITS = [0.3, 1.1, -0.4, 2.0, 1.1, 0.3, 0.3, -2.0, 1.5, 0.9, -1.0, 0.6]
TRUNCATIONS = [
    {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    for top_k, top_p, min_p in itertools.product((0, 5), (1.0, 0.75), (0.0, 0.2))
]
DRAWS = 20_000
PAIRED = 8_000


@pytest.fixture(params=["native", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run each test on the compiled kernels, then as on a machine without a compiler."""
    if request.param == "native":
        native_or_skip(torch.float64)
        yield "native"
    else:
        with library.disabled():
            yield "torch"


def weights(logits: torch.Tensor, rows: list[Sampling]) -> torch.Tensor:
    return sampling.filtered(logits, sampling.Parameters.of(rows, "cpu"))


@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("vocabulary", [40, 5000])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_the_distribution_is_that_of_transformers(row: Sampling, vocabulary: int, scale: float) -> None:
    logits = scale * torch.randn(1, vocabulary, dtype=torch.float64, generator=torch.manual_seed(1))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(row.temperature)])
    if row.top_k:
        warpers.append(TopKLogitsWarper(row.top_k))
    if row.top_p < 1:
        warpers.append(TopPLogitsWarper(row.top_p))
    if row.min_p:
        warpers.append(MinPLogitsWarper(row.min_p))
    reference = warpers(torch.zeros(1, 1, dtype=torch.long), logits).softmax(-1)
    ours = weights(logits, [row])
    torch.testing.assert_close(ours / ours.sum(), reference)


def test_rows_do_not_influence_each_other() -> None:
    logits = 2 * torch.randn(len(ROWS), 3000, generator=torch.manual_seed(2))
    together = weights(logits, ROWS)
    for index, row in enumerate(ROWS):
        assert torch.equal(together[index], weights(logits[index : index + 1], [row])[0])


def exact(logits: list[float], row: Sampling) -> list[float]:
    """Return the probabilities as the parameters are defined, token by token."""
    found = [math.exp(logit / row.temperature) for logit in logits]

    def keep(least: float) -> None:
        found[:] = [weight if weight >= least else 0.0 for weight in found]

    if row.top_k:
        keep(sorted(found)[-row.top_k])
    before, total = 0.0, sum(found)
    for weight in sorted(found, reverse=True):
        if before >= row.top_p * total:
            break
        before, last = before + weight, weight
    keep(last)
    keep(row.min_p * max(found))
    return [weight / sum(found) for weight in found]


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how probable counts are that differ at least so much from the expected ones (Pearson 1900)."""
    possible = expected > 0
    assert not bool(counts[~possible].any())
    counts, expected = counts[possible].double(), expected[possible]
    if len(counts) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def drawn_by(logits: list[float], rows: list[Sampling], positions: list[int]) -> torch.Tensor:
    each = torch.tensor(logits, dtype=torch.float64).expand(len(rows), -1)
    return sampling.draw(each, sampling.Parameters.of(rows, "cpu"), positions)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, *(pytest.param(t, marks=pytest.mark.long) for t in (1.0, 1.8))])
def test_draws_have_the_frequencies_of_the_exact_distribution(
    truncation: dict[str, float], temperature: float
) -> None:
    wanted = torch.tensor(exact(LOGITS, Sampling(1, temperature=temperature, **truncation)))  # type: ignore
    # Many requests, each at many positions.
    requests = [
        Sampling(1, temperature=temperature, seed=seed, **truncation)  # type: ignore[arg-type]
        for seed in range(DRAWS // 100)
    ]
    rows = [each for each in requests for _ in range(100)]
    drawn = drawn_by(LOGITS, rows, [draw % 100 for draw in range(DRAWS)])
    assert p_value(torch.bincount(drawn, minlength=len(LOGITS)), wanted.double() * DRAWS) > 1e-3


@pytest.mark.usefixtures("way")
def test_a_distribution_that_is_a_little_off_is_noticed() -> None:
    rows = [Sampling(1, temperature=1.15, seed=seed) for seed in range(DRAWS)]
    counts = torch.bincount(drawn_by(LOGITS, rows, [0] * DRAWS), minlength=len(LOGITS))
    wanted = torch.tensor(exact(LOGITS, Sampling(1))).double() * DRAWS
    assert p_value(counts, wanted) < 1e-6


@pytest.mark.usefixtures("way")
def test_masked_tokens_are_never_drawn() -> None:
    logits = [math.log(p) if p else -math.inf for p in (0.0, 0.5, 0.0, 0.25, 0.25, 0.0)]
    for truncation in TRUNCATIONS:
        rows = [Sampling(1, seed=seed, **truncation) for seed in range(2000)]  # type: ignore[arg-type]
        assert set(drawn_by(logits, rows, [0] * 2000).tolist()) <= {1, 3, 4}


PAIRS = {
    "neighbouring positions": lambda i: ((i, 0), (i, 1)),
    "distant positions": lambda i: ((i, 0), (i, 1024)),
    "neighbouring seeds": lambda i: ((2 * i, 7), (2 * i + 1, 7)),
    "seeds that differ in one high bit": lambda i: ((i, 7), (i + 2**63, 7)),
    "the first two choices": lambda i: ((i, 7), (seeds.seed_of_choice(i, 1), 7)),
    "later choices": lambda i: tuple((seeds.seed_of_choice(i, choice), 7) for choice in (3, 4)),
    "choices of neighbouring requests": lambda i: tuple(
        (seeds.seed_of_choice(seed, 2), 7) for seed in (2 * i, 2 * i + 1)
    ),
    "a choice and another's next token": lambda i: (
        (seeds.seed_of_choice(i, 1), 8),
        (seeds.seed_of_choice(i, 2), 7),
    ),
}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("pair", PAIRS)
def test_draws_are_independent(pair: str) -> None:
    pairs = [PAIRS[pair](index) for index in range(PAIRED)]
    logits = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
    first, second = (
        drawn_by(logits, [Sampling(1, seed=both[side][0]) for both in pairs], [b[side][1] for b in pairs])
        for side in (0, 1)
    )
    one = torch.tensor(logits, dtype=torch.float64).exp()
    counts = torch.bincount(4 * first + second, minlength=16)
    assert p_value(counts, torch.outer(one, one).flatten() * PAIRED) > 1e-3
    uniforms = torch.tensor([[seeds.uniform(*draw) for draw in both] for both in pairs]).T
    assert abs(float(torch.corrcoef(uniforms)[0, 1])) < 4 / PAIRED**0.5


def test_the_first_choice_keeps_the_seed_and_all_have_their_own() -> None:
    given = [*range(-50, 50), 2**63, 2**64 + 1000]
    assert [seeds.seed_of_choice(seed, 0) for seed in given] == given
    every = [seeds.seed_of_choice(seed, choice) for seed in given for choice in range(128)]
    assert len({seed % 2**64 for seed in every}) == len(every)


def test_a_seed_means_the_same_draws_for_ever() -> None:
    assert [seeds.uniform(seed, 3) for seed in (0, 1, -1)] == [
        0.6210647506025976,
        0.9529046633056012,
        0.9145270767545588,
    ]
    assert [seeds.seed_of_choice(5, choice) for choice in (0, 1, 2)] == [
        5,
        16247700015443706586,
        12064417309231021417,
    ]


@pytest.mark.usefixtures("way")
def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = torch.zeros(3, 1000)
    parameters = sampling.Parameters.of([Sampling(1, seed=seed) for seed in (5, 6, 5)], "cpu")
    first = sampling.draw(logits, parameters, [0, 0, 0]).tolist()
    assert first[0] == first[2] != first[1]
    assert sampling.draw(logits, parameters, [0, 0, 1]).tolist()[2] != first[0]
    assert (
        sampling.draw(logits[:1], sampling.Parameters.of([Sampling(1, seed=5)], "cpu"), [0]).tolist()
        == first[:1]
    )


def test_uniforms_are_even_and_below_one() -> None:
    values = torch.tensor([seeds.uniform(seed, position) for seed in range(100) for position in range(100)])
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert abs(float(values.mean()) - 0.5) < 0.01
    assert abs(float(values.var()) - 1 / 12) < 0.005
    assert len(set(values.tolist())) > 9990
    # Neighbouring positions and neighbouring seeds are not correlated.
    grid = values.reshape(100, 100)
    assert (
        abs(float(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1])) < 0.05
    )
    assert abs(float(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1])) < 0.05


@pytest.mark.parametrize("seed", [-1, 0, 2**63 - 1, 2**64, -(2**63)])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert 0 <= seeds.uniform(seed, 10**6) < 1


@pytest.mark.usefixtures("way")
def test_the_largest_uniform_draws_a_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "uniform", lambda seed, position: 1 - 2.0**-53)
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert sampling.draw(logits, sampling.Parameters.of([Sampling(1)], "cpu"), [0]).tolist() == [1]
    monkeypatch.setattr(seeds, "uniform", lambda seed, position: 0.0)
    logits = torch.tensor([[-torch.inf, 1.0, 0.0]])
    assert sampling.draw(logits, sampling.Parameters.of([Sampling(1)], "cpu"), [0]).tolist() == [1]
