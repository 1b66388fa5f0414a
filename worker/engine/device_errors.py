"""Errors that are not a request's fault: memory was short, or the device is gone."""

import torch


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_lost(error: BaseException) -> bool:
    """Tell whether a GPU is unusable for the rest of the process, as after an illegal memory access."""
    return not is_out_of_memory(error) and isinstance(error, torch.AcceleratorError)
