"""In what numbers a model runs: a dtype that suits the device, and no rounding that nobody asked for."""

import logging

import torch

log = logging.getLogger(__name__)
# Ampere: older cards compute in bfloat16 by converting, slower than in float32.
_BFLOAT16_FROM = (8, 0)
_HALVES = (torch.bfloat16, torch.float16)


def pick_dtype(
    wanted: str, own: torch.dtype | None, device: torch.device, capability: tuple[int, int] | None = None
) -> torch.dtype:
    """Return the dtype to run a model in whose weights are `own`; raises ValueError.

    auto is float32 on a CPU (half precision is slower there). On a GPU it is half precision: bfloat16 from
    compute capability 8.0 on, below it float16; a model in float16 stays in it. `capability` None asks the
    device.
    """
    dtype = _named(wanted) if wanted != "auto" else None
    if device.type == "cpu":
        return dtype or torch.float32
    if dtype is None:
        able = (capability or torch.cuda.get_device_capability(device)) >= _BFLOAT16_FROM
        dtype = torch.float16 if own == torch.float16 or not able else torch.bfloat16
    if own == torch.bfloat16 and dtype == torch.float16:
        log.warning(
            "a model trained in bfloat16 runs in float16: numbers above 65504 become infinite; its dtype in"
            " LONGHAUL_MODELS can be float32"
        )
    return dtype


def _named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def set_policy(device: torch.device, tf32: bool) -> None:
    """Set how a GPU's matrix products and convolutions round, for the whole process; log it.

    With `tf32` those of float32 numbers round their factors to 10 bits of mantissa. Sums of half precision
    products are kept in float32 to their end. A CPU always computes in the dtype it is given.
    """
    if device.type != "cuda":
        return
    # Not `cuda.matmul.fp32_precision`: once that is tf32, torch's compiler raises where it asks for this one.
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    log.info("products", extra={"device": device, "tf32": tf32, "half_precision_sums": "float32"})


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALVES


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return in what sums over numbers of a dtype are kept: float64 for itself, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
