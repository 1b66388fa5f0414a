"""A draw is decided by seed and position, on whatever device the logits are."""

import pytest
import torch

from worker.engine import Sampling, sampling
from worker.engine.native import library

_KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.3, "top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.95, "top_k": 5000, "min_p": 0.001},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_device_draws_what_the_cpu_draws(dtype: torch.dtype, scale: float, device: torch.device) -> None:
    """Also where the distribution is flat, so that many tokens are kept."""
    rows, vocabulary = 40, 50_000
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1)) * scale
    logits = logits.to(dtype)
    asked = [Sampling(1, seed=row, **_KINDS[row % len(_KINDS)]) for row in range(rows)]
    positions = [row % 3 for row in range(rows)]
    expected = sampling.draw(logits, sampling.Parameters.of(asked, "cpu"), positions)
    with library.disabled(True):  # on a CPU, torch's operations in place of the kernels
        drawn = sampling.draw(logits.to(device), sampling.Parameters.of(asked, device), positions)
    assert drawn.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > rows // 2
