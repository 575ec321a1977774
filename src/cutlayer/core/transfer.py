"""From the host to the device, without waiting for it."""

from typing import Any

import torch
from torch import Tensor


def sent(here: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def upload(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on the device."""
    return sent(torch.as_tensor(numbers, dtype=dtype), device)
