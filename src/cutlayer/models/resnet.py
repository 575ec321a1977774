"""Residual networks (He et al., 2016); a unit is the stem, a residual block or the head."""

from typing import NamedTuple

from torch import Tensor, nn

from cutlayer.errors import ConfigError
from cutlayer.models.norms import Norm, feature_norm, image_norm
from cutlayer.models.parts import Init, Stem, UnitNetwork, Units, image_stem, init_convolutions, preset


class Basic(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = image_norm(norm, width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = image_norm(norm, width)
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        activated: Tensor = self.relu(out + shortcut)
        return activated


class Bottleneck(nn.Module):
    """A strided 3x3 convolution between two of 1x1 that narrow and widen, beside a shortcut."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = image_norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = image_norm(norm, width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = image_norm(norm, outputs)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        activated: Tensor = self.relu(out + shortcut)
        return activated


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module | None:
    """Return a projection if the block changes the shape, else None."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), image_norm(norm, outputs))


class Stages(NamedTuple):
    """The type of the blocks, and their number in each stage."""

    block: type[Basic] | type[Bottleneck]
    counts: tuple[int, ...]


class ResNet(UnitNetwork):
    """A residual network with torchvision's names; channels double from `width`, `head` lists hidden layers."""

    def __init__(
        self,
        plan: Stages,
        num_classes: int = 10,
        in_channels: int = 3,
        stem: Stem = "3x3",
        norm: Norm = "batch",
        width: int = 64,
        strides: tuple[int, ...] = (1, 2, 2, 2),
        head: tuple[int, ...] = (),
        init: Init = "he",
    ) -> None:
        super().__init__()
        block, self.counts = plan
        if len(strides) != len(self.counts):
            raise ConfigError(f"strides has {len(strides)} numbers; give one for each of the {len(self.counts)} stages")
        self.conv1, self.bn1, self.relu, self.maxpool = image_stem(stem, in_channels, width, norm)
        channels = width
        for i, (count, stride) in enumerate(zip(self.counts, strides, strict=True)):
            inner = width * 2**i
            outputs = inner * block.expansion
            first = block(channels, inner, stride, norm)
            rest = [block(outputs, inner, 1, norm) for _ in range(count - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(first, *rest))
            channels = outputs
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = _classifier(channels, head, num_classes, norm)
        init_convolutions(self, init)

    def units(self) -> Units:
        blocks = [f"layer{i}.{j}" for i, count in enumerate(self.counts, start=1) for j in range(count)]
        return (
            ("stem", ("conv1", "bn1", "relu", "maxpool")),
            *((name, (name,)) for name in blocks),
            ("head", ("avgpool", "flatten", "fc")),
        )


def _classifier(features: int, hidden: tuple[int, ...], num_classes: int, norm: Norm) -> nn.Module:
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(features, size, bias=norm != "batch"), feature_norm(norm, size), nn.ReLU()]
        features = size
    last = nn.Linear(features, num_classes)
    return nn.Sequential(*layers, last) if hidden else last


resnet18 = preset(
    "ResNet-18; the 3x3 stem is for small images, the ImageNet stem shrinks them fourfold first.",
    ResNet,
    Stages(Basic, (2, 2, 2, 2)),
)
resnet34 = preset("ResNet-34: as ResNet-18, with 16 blocks instead of 8.", ResNet, Stages(Basic, (3, 4, 6, 3)))
resnet50 = preset("ResNet-50: 16 bottleneck blocks.", ResNet, Stages(Bottleneck, (3, 4, 6, 3)))


def resnet_tiny(
    num_classes: int = 10,
    in_channels: int = 1,
    stem: Stem = "3x3",
    norm: Norm = "batch",
    width: int = 4,
    init: Init = "he",
) -> ResNet:
    """A residual network of a few thousand parameters, with all the features of a large one."""
    return ResNet(Stages(Basic, (1, 1, 1)), num_classes, in_channels, stem, norm, width, strides=(1, 2, 2), init=init)
