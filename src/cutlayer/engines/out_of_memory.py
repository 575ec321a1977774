"""Recognise out-of-memory errors, and free memory."""

import gc

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory: torch's allocator has its own error, CUDA itself only a message."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def release() -> None:
    """Free memory that nothing refers to any more: a recorded graph holds its memory until it is collected."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
