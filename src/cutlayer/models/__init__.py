"""The zoo: models that come with their units, by name."""

from collections.abc import Callable
from typing import Any

from torch import nn

from cutlayer import registry
from cutlayer.models.resnet import ResNet, resnet18, resnet_tiny
from cutlayer.models.small import cnn, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn": cnn,
    "mlp": mlp,
    "resnet18": resnet18,
    "resnet_tiny": resnet_tiny,
}


def build(name: str, **options: Any) -> nn.Module:
    """A model of the zoo, by name."""
    return registry.make("model", MODELS, name, options)


__all__ = ["MODELS", "ResNet", "build", "cnn", "mlp", "resnet18", "resnet_tiny"]
