"""From the host to the device, without waiting for it; and memory of a device that nobody holds any more."""

import gc
from typing import Any

import torch
from torch import Tensor


def sent(here: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def upload(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device."""
    return sent(torch.as_tensor(numbers, dtype=dtype), device)


def release() -> None:
    """Give back what is held no more: recorded graphs keep their memory as long as they live."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
