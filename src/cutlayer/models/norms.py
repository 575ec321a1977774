"""Normalisation layers, by name."""

import math
from typing import Literal, get_args

from torch import nn

from cutlayer.core.torch_private import BatchNorm
from cutlayer.errors import UnknownNameError

Norm = Literal["none", "batch", "group"]


def image_norm(name: Norm, channels: int) -> nn.Module:
    """The normalisation of that name for images of so many channels."""
    if name == "none":
        return nn.Identity()
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "group":
        groups = math.gcd(channels, max(1, channels // 16))  # 16 channels to a group, or as near as divides
        return nn.GroupNorm(groups, channels)
    raise UnknownNameError("norm", name, get_args(Norm))


def feature_norm(name: Norm, features: int) -> nn.Module:
    """The normalisation of that name for vectors of so many features."""
    return nn.BatchNorm1d(features) if name == "batch" else image_norm(name, features)


def freeze_norms(model: nn.Module) -> nn.Module:
    """The model itself, its BatchNorm layers with the statistics and parameters that they have, for good."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval().requires_grad_(False)
    return model
