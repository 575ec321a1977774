"""When a device's memory is short."""

import gc

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether a device had too little memory: torch's allocator has an error for it, CUDA itself says so in words."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def release() -> None:
    """Give back what is held no more: recorded graphs keep their memory as long as they live."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
