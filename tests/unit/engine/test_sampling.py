"""Draws follow the distribution that the parameters ask for, and depend on seed and position alone."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from worker.engine import Sampling, sampling, seeds

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


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.0, 0.25, 0.0, 0.25]).log().expand(20_000, 5)
    rows = [Sampling(1, seed=seed) for seed in range(20_000)]
    drawn = sampling.draw(logits, sampling.Parameters.of(rows, "cpu"), [3] * 20_000)
    frequencies = torch.bincount(drawn, minlength=5) / 20_000
    torch.testing.assert_close(frequencies, torch.tensor([0.5, 0, 0.25, 0, 0.25]), atol=0.02, rtol=0)
    assert frequencies[1] == frequencies[3] == 0


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


def test_the_largest_uniform_draws_a_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "uniform", lambda seed, position: 1 - 2.0**-53)
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert sampling.draw(logits, sampling.Parameters.of([Sampling(1)], "cpu"), [0]).tolist() == [1]
    monkeypatch.setattr(seeds, "uniform", lambda seed, position: 0.0)
    logits = torch.tensor([[-torch.inf, 1.0, 0.0]])
    assert sampling.draw(logits, sampling.Parameters.of([Sampling(1)], "cpu"), [0]).tolist() == [1]
