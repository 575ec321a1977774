"""Normalisation layers, by name."""

import math
from typing import Literal, get_args

from torch import nn

from cutlayer.core.torch_private import BatchNorm
from cutlayer.errors import UnknownNameError

Norm = Literal["none", "batch", "group"]


def image_norm(name: Norm, channels: int) -> nn.Module:
    """Return the normalisation of this name for images with `channels` channels."""
    if name == "none":
        return nn.Identity()
    if name == "batch":
        return nn.BatchNorm2d(channels)
    if name == "group":
        groups = math.gcd(channels, max(1, channels // 16))  # 16 channels to a group if that divides them
        return nn.GroupNorm(groups, channels)
    raise UnknownNameError("norm", name, get_args(Norm))


def feature_norm(name: Norm, features: int) -> nn.Module:
    """Return the normalisation of this name for vectors of `features` features."""
    return nn.BatchNorm1d(features) if name == "batch" else image_norm(name, features)


def freeze_norms(model: nn.Module) -> nn.Module:
    """Freeze the statistics and parameters of a model's BatchNorm layers, and return the model."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.eval().requires_grad_(False)
    return model
