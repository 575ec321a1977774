"""The zoo: models by name, with the units that they can be cut between.

Imports: core, data, errors, registry.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from cutlayer import registry
from cutlayer.errors import ConfigError
from cutlayer.models.densenet import DenseNet, densenet121, densenet169
from cutlayer.models.language import causal_lm
from cutlayer.models.mobilenet import MobileNetV2, mobilenet_v2
from cutlayer.models.norms import freeze_norms
from cutlayer.models.parts import Init
from cutlayer.models.resnet import ResNet, resnet18, resnet34, resnet50, resnet_tiny
from cutlayer.models.small import cnn, mlp
from cutlayer.models.transformer import CharTransformer, char_transformer
from cutlayer.models.vgg import VGG, vgg11, vgg16
from cutlayer.models.weights import load_weights

MODELS: registry.Table[Callable[..., nn.Module]] = registry.table(
    "MODELS",
    {
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
    },
)


def default_init(name: str) -> Init | None:
    """Return the default of a model's `init`; None if it has no such option."""
    init = _options(name).get("init")
    return init.default if init is not None and init.annotation == Init else None


def check_init(name: str, options: Mapping[str, Any]) -> None:
    """Refuse `init` for a model that has no such option."""
    if "init" in options and name in MODELS and "init" not in _options(name):
        able = ", ".join(known for known in MODELS if default_init(known))
        raise ConfigError(f"the model {name!r} has no init; leave it out. Models that choose their weights: {able}")


def _options(name: str) -> registry.Parameters:
    return registry.options_of(MODELS[name]) if name in MODELS else {}


def build(name: str, **options: Any) -> nn.Module:
    """Build a model of the zoo by name."""
    check_init(name, options)
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
