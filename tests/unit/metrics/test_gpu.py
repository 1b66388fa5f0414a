"""GPUs are shown where there are some, and left out where not."""

import os
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from worker.metrics import gpu


class TwoCards:
    """As much of pynvml as is asked, with two cards; the second has no sensor for power."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return ["GPU-a", "GPU-b"].index(uuid)

    def nvmlDeviceGetIndex(self, card: int) -> int:
        return card

    def nvmlDeviceGetUtilizationRates(self, card: int) -> Any:
        return SimpleNamespace(gpu=50 + card)

    def nvmlDeviceGetMemoryInfo(self, card: int) -> Any:
        return SimpleNamespace(used=1 << 30, total=4 << 30)

    def nvmlDeviceGetTemperature(self, card: int, sensor: int) -> int:
        return 60

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:
        if card:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 250_000


def read(monkeypatch: pytest.MonkeyPatch, visible: str | None) -> dict[str, dict[str, float]]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    families = gpu.Gpus(TwoCards()).collect()
    return {one.name: {sample.labels["gpu"]: sample.value for sample in one.samples} for one in families}


def test_each_card_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, None) == {
        "longhaul_gpu_utilisation_ratio": {"0": 0.5, "1": 0.51},
        "longhaul_gpu_memory_used_bytes": {"0": 1 << 30, "1": 1 << 30},
        "longhaul_gpu_memory_total_bytes": {"0": 4 << 30, "1": 4 << 30},
        "longhaul_gpu_temperature_celsius": {"0": 60, "1": 60},
        "longhaul_gpu_power_watts": {"0": 250},
    }


@pytest.mark.parametrize(("visible", "cards"), [("1", ["1"]), ("GPU-b,0", ["1", "0"]), ("", []), ("-1", [])])
def test_a_worker_shows_the_cards_it_may_see(
    monkeypatch: pytest.MonkeyPatch, visible: str, cards: list[str]
) -> None:
    shown = read(monkeypatch, visible)
    assert list(shown.get("longhaul_gpu_temperature_celsius", {})) == cards


def test_the_stand_in_has_pynvmls_names() -> None:
    for name in vars(TwoCards):
        assert name.startswith("__") or hasattr(pynvml, name), name


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a card")
def test_without_a_card_nothing_is_shown() -> None:
    assert gpu.Gpus.found() is None
