"""Use, memory, temperature of the GPUs that a worker sees, by nvidia-ml-py. Without it or a card: nothing."""

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from jobs.metrics.families import Family

log = logging.getLogger(__name__)
UTILISATION, USED, TOTAL, TEMPERATURE, POWER = FAMILIES = tuple(
    Family(name, "gauge", help, ("gpu",))
    for name, help in {
        "gpu_utilisation_ratio": "Share of the last moment in which a kernel ran.",
        "gpu_memory_used_bytes": "Memory in use, by whomever.",
        "gpu_memory_total_bytes": "Memory it has.",
        "gpu_temperature_celsius": "Temperature.",
        "gpu_power_watts": "Power it draws.",
    }.items()
)


class Gpus(Collector):
    """Asks NVML at each scrape. `gpu` is the card's number on its machine, in the order of nvidia-smi.

    CUDA numbers unlike cards otherwise: set CUDA_DEVICE_ORDER=PCI_BUS_ID there. What a card does not tell
    (some have no sensor) is left out.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._cards = [(str(nvml.nvmlDeviceGetIndex(card)), card) for card in _visible(nvml)]

    @classmethod
    def found(cls) -> "Gpus | None":
        """Return the collector, None where there is no nvidia-ml-py or no card."""
        try:
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml)
        except ImportError:
            return None
        except pynvml.NVMLError as error:
            log.info("no GPU is watched", extra={"reason": str(error)})
            return None

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not ask."""
        return []

    def collect(self) -> Iterator[Metric]:
        told = [(name, family, value) for name, card in self._cards for family, value in self._read(card)]
        for family in FAMILIES:
            if samples := [((name,), value) for name, of, value in told if of is family]:
                yield family.of(*samples)

    def _read(self, card: Any) -> Iterator[tuple[Family, float]]:
        nvml = self._nvml
        ways: dict[Family, Callable[[], float]] = {
            UTILISATION: lambda: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
            USED: lambda: nvml.nvmlDeviceGetMemoryInfo(card).used,
            TOTAL: lambda: nvml.nvmlDeviceGetMemoryInfo(card).total,
            TEMPERATURE: lambda: nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
            POWER: lambda: nvml.nvmlDeviceGetPowerUsage(card) / 1000,
        }
        for family, way in ways.items():
            try:
                yield family, way()
            except nvml.NVMLError as error:
                log.debug("not told by the GPU", extra={"metric": family.name, "reason": str(error)})


def _visible(nvml: Any) -> list[Any]:
    """Return the cards that CUDA_VISIBLE_DEVICES names by number or UUID; all, when it is not set."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    return [_card(nvml, name.strip()) for name in named.split(",") if name.strip() not in ("", "-1")]


def _card(nvml: Any, name: str) -> Any:
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
