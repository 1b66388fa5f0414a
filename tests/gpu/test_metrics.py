"""A worker shows the card that it runs on."""

import pytest
import torch

from worker.metrics import gpu


def test_the_card_says_how_it_is(card: torch.device) -> None:
    pytest.importorskip("pynvml")
    found = gpu.Gpus.found()
    assert found is not None
    held = torch.ones(256 << 20, dtype=torch.uint8, device=card)
    shown = {one.name.removeprefix("longhaul_"): one.samples[0].value for one in found.collect()}
    total = torch.cuda.get_device_properties(card).total_memory
    assert 0 <= shown["gpu_utilisation_ratio"] <= 1
    assert 10 < shown["gpu_temperature_celsius"] < 120
    assert held.nbytes < shown["gpu_memory_used_bytes"] <= shown["gpu_memory_total_bytes"]
    assert shown["gpu_memory_total_bytes"] == pytest.approx(total, rel=0.1)
