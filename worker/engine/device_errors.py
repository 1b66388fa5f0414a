"""Errors that are not a request's fault: memory was short, or the device is gone."""

import torch

_RECORDING_FAILED = range(900, 909)
"""The codes of cudaErrorStreamCapture...: a CUDA graph cannot be recorded so, and all else works on."""


_NO_MEMORY_CODE = 2
"""cudaErrorMemoryAllocation: of what does not go through torch's allocator; all else works on."""
_NO_MEMORY = ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    code = getattr(error, "error_code", None)
    return code == _NO_MEMORY_CODE or any(text in str(error) for text in _NO_MEMORY)


def is_lost(error: BaseException) -> bool:
    """Tell whether a GPU is unusable for the rest of the process, as after an illegal memory access."""
    if is_out_of_memory(error) or getattr(error, "error_code", None) in _RECORDING_FAILED:
        return False
    return isinstance(error, torch.AcceleratorError)
