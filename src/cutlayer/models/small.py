"""Small models: nn.Sequential, whose children are the units."""

from collections import OrderedDict

from torch import nn

from cutlayer.models.norms import Norm, image_norm


def mlp(in_features: int = 64, hidden: tuple[int, ...] = (64, 32), num_classes: int = 10) -> nn.Sequential:
    """Fully connected layers with ReLU: units fc1, fc2, ..., head."""
    units: OrderedDict[str, nn.Module] = OrderedDict()
    width = in_features
    for i, size in enumerate(hidden, start=1):
        units[f"fc{i}"] = nn.Sequential(nn.Flatten(), nn.Linear(width, size), nn.ReLU())
        width = size
    head = nn.Linear(width, num_classes)
    units["head"] = head if hidden else nn.Sequential(nn.Flatten(), head)
    return nn.Sequential(units)


def cnn(
    in_channels: int = 1, num_classes: int = 10, image_size: int = 8, width: int = 16, norm: Norm = "none"
) -> nn.Sequential:
    """Two convolutions, each with ReLU and pooling, and two fully connected layers: units conv1, conv2, fc1, head."""
    features = 2 * width * (image_size // 4) ** 2
    units: OrderedDict[str, nn.Module] = OrderedDict()
    units["conv1"] = _conv(in_channels, width, norm)
    units["conv2"] = _conv(width, 2 * width, norm)
    units["fc1"] = nn.Sequential(nn.Flatten(), nn.Linear(features, 4 * width), nn.ReLU())
    units["head"] = nn.Linear(4 * width, num_classes)
    return nn.Sequential(units)


def _conv(inputs: int, outputs: int, norm: Norm) -> nn.Sequential:
    # No bias before BatchNorm, which removes it again: it would only collect rounding noise.
    conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm != "batch")
    return nn.Sequential(conv, image_norm(norm, outputs), nn.ReLU(), nn.MaxPool2d(2))
