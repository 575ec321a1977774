"""The zoo: models that come with their units, by name."""

from collections.abc import Callable
from typing import Any

from torch import nn

from cutlayer import registry
from cutlayer.models.densenet import DenseNet, densenet121, densenet169
from cutlayer.models.language import causal_lm
from cutlayer.models.mobilenet import MobileNetV2, mobilenet_v2
from cutlayer.models.norms import freeze_norms
from cutlayer.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet_tiny
from cutlayer.models.small import cnn, mlp
from cutlayer.models.transformer import CharTransformer, char_transformer
from cutlayer.models.vgg import VGG, vgg11, vgg16
from cutlayer.models.weights import load_weights

MODELS: dict[str, Callable[..., nn.Module]] = {
    "causal_lm": causal_lm,
    "char_transformer": char_transformer,
    "cnn": cnn,
    "densenet121": densenet121,
    "densenet169": densenet169,
    "mlp": mlp,
    "mobilenet_v2": mobilenet_v2,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet_tiny": resnet_tiny,
    "vgg11": vgg11,
    "vgg16": vgg16,
}


def build(name: str, **options: Any) -> nn.Module:
    """A model of the zoo, by name."""
    return registry.make("model", MODELS, name, options)


__all__ = [
    "MODELS",
    "VGG",
    "CharTransformer",
    "DenseNet",
    "MobileNetV2",
    "ResNet",
    "build",
    "causal_lm",
    "char_transformer",
    "cnn",
    "densenet121",
    "densenet169",
    "freeze_norms",
    "load_weights",
    "mlp",
    "mobilenet_v2",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet_tiny",
    "vgg11",
    "vgg16",
]
