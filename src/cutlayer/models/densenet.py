"""Densely connected networks (Huang et al., 2017); a unit is the stem, a dense layer, a transition or the head."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from cutlayer.models.norms import Norm, image_norm
from cutlayer.models.parts import Init, Stem, UnitNetwork, Units, image_stem, init_convolutions, preset

BOTTLENECK = 4  # channels inside of a dense layer, as a multiple of `growth`


class DenseLayer(nn.Sequential):
    """Computes `growth` channels from its input and appends them to it."""

    def __init__(self, channels: int, growth: int, norm: Norm) -> None:
        inner = BOTTLENECK * growth
        super().__init__(
            OrderedDict(
                norm1=image_norm(norm, channels),
                relu1=nn.ReLU(),
                conv1=nn.Conv2d(channels, inner, 1, bias=False),
                norm2=image_norm(norm, inner),
                relu2=nn.ReLU(),
                conv2=nn.Conv2d(inner, growth, 3, padding=1, bias=False),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)  # type: ignore[no-untyped-call]


class DenseNet(UnitNetwork):
    """Blocks of dense layers, with transitions between them that halve the image; torchvision's names."""

    def __init__(
        self,
        blocks: tuple[int, ...],
        num_classes: int = 10,
        in_channels: int = 3,
        stem: Stem = "3x3",
        norm: Norm = "batch",
        growth: int = 32,
        init: Init = "he",
    ) -> None:
        super().__init__()
        channels = 2 * growth
        conv, normalised, relu, pool = image_stem(stem, in_channels, channels, norm)
        features: OrderedDict[str, nn.Module] = OrderedDict(conv0=conv, norm0=normalised, relu0=relu, pool0=pool)
        for i, count in enumerate(blocks, start=1):
            layers = [DenseLayer(channels + j * growth, growth, norm) for j in range(count)]
            named = {f"denselayer{j}": layer for j, layer in enumerate(layers, start=1)}
            features[f"denseblock{i}"] = nn.Sequential(OrderedDict(named))
            channels += count * growth
            if i < len(blocks):
                features[f"transition{i}"] = _transition(channels, norm)
                channels //= 2
        features["norm5"] = image_norm(norm, channels)
        self.blocks = blocks
        self.features = nn.Sequential(features)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(channels, num_classes)
        init_convolutions(self, init, mode="fan_in")

    def units(self) -> Units:
        names: list[str] = []
        for i, count in enumerate(self.blocks, start=1):
            names += [f"denseblock{i}.denselayer{j}" for j in range(1, count + 1)]
            names += [f"transition{i}"] if i < len(self.blocks) else []
        return (
            ("stem", ("features.conv0", "features.norm0", "features.relu0", "features.pool0")),
            *((name, (f"features.{name}",)) for name in names),
            ("head", ("features.norm5", "relu", "avgpool", "flatten", "classifier")),
        )


def _transition(channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=image_norm(norm, channels),
            relu=nn.ReLU(),
            conv=nn.Conv2d(channels, channels // 2, 1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


densenet121 = preset("DenseNet-121: 58 dense layers in 4 blocks.", DenseNet, (6, 12, 24, 16))
densenet169 = preset("DenseNet-169: 82 dense layers in 4 blocks.", DenseNet, (6, 12, 32, 32))
