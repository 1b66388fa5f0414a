"""What there is to compute with: torch and its build, GPU and driver, flash-attn, a compiler."""

from collections.abc import Iterator
from typing import Any

import torch

from jobs.doctor_findings import Finding, Look
from jobs.settings import Settings
from worker.engine import attention_flash, loader
from worker.engine.native import library

_look = Look("device")
_FLASH_CAPABILITY = (8, 0)


def check(settings: Settings) -> Iterator[Finding]:
    """Look at the device of the settings."""
    card = _driver()
    build = torch.version.cuda
    yield _look.ok("torch", f"{torch.__version__}, {f'built for CUDA {build}' if build else 'a CPU build'}")
    if card and not torch.cuda.is_available():
        why = "it cannot use the card" if build else "it is a build for CPUs"
        advice = "Install torch for the driver's CUDA (pytorch.org), or update the driver: docs/gpu.md."
        yield _look.wrong("gpu", f"{card}, but torch does not see it: {why}", advice)
    try:
        device = loader.pick_device(settings.device)
    except (ValueError, RuntimeError) as error:
        yield _look.wrong("device", str(error), "Change LONGHAUL_DEVICE; auto takes what there is.")
        return
    yield from _gpu(device, card) if device.type == "cuda" else _cpu(device)


def _cpu(device: torch.device) -> Iterator[Finding]:
    yield _look.ok("device", f"{device}, {torch.get_num_threads()} threads; no GPU is used")
    try:
        compiler, path = library.cached()
    except library.Unavailable as reason:
        advice = "Install g++ or clang++: without it torch's own operations do the work, slower."
        yield _look.warning("compiler", str(reason), advice)
        return
    built = "kernels are built" if path.exists() else "kernels are built when a model is first loaded"
    yield _look.ok("compiler", f"{compiler}; {built}")


def _gpu(device: torch.device, card: str | None) -> Iterator[Finding]:
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    said = f"{facts.name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free; {card or 'driver not known'}"
    if free < total / 2:
        yield _look.warning("gpu", said, "Something else holds its memory: nvidia-smi shows what.")
    else:
        yield _look.ok("gpu", said)
    if (facts.major, facts.minor) < _FLASH_CAPABILITY:
        said = f"compute capability {facts.major}.{facts.minor}"
        yield _look.warning("flash-attn", said, "It needs 8.0: torch's own attention serves, slower.")
        return
    try:
        yield _look.ok("flash-attn", str(getattr(attention_flash.load(), "__version__", "found")))
    except attention_flash.Unavailable as reason:
        advice = "Attention is slower without: pip install 'longhaul[gpu]' (docs/gpu.md)."
        yield _look.warning("flash-attn", str(reason), advice)


def _driver() -> str | None:
    """Return the first card and its driver as NVML tells, which needs no torch; None without one."""
    try:
        import pynvml

        nvml: Any = pynvml
        nvml.nvmlInit()
        name, driver = (
            nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)),
            nvml.nvmlSystemGetDriverVersion(),
        )
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
    except Exception:  # no module, no driver, no card
        return None
    return f"{name}, driver {driver} for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
