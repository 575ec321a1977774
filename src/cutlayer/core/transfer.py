"""Copies from the host to a device, without waiting for them."""

from typing import Any

import torch
from torch import Tensor


def sent(here: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def upload(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to the device."""
    return sent(torch.as_tensor(numbers, dtype=dtype), device)
