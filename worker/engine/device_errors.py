"""Errors that are not a request's fault: memory was short, or the device is gone."""

import torch

_RECORDING_FAILED = range(900, 909)
"""The codes of cudaErrorStreamCapture...: a CUDA graph cannot be recorded so, and all else works on."""


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_lost(error: BaseException) -> bool:
    """Tell whether a GPU is unusable for the rest of the process, as after an illegal memory access."""
    if is_out_of_memory(error) or getattr(error, "error_code", None) in _RECORDING_FAILED:
        return False
    return isinstance(error, torch.AcceleratorError)
