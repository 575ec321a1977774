"""Residual networks; a unit is the stem, a residual block or the head."""

from typing import Literal, get_args

from torch import Tensor, nn

from cutlayer.errors import UnknownNameError
from cutlayer.models.norms import Norm, image_norm

Stem = Literal["3x3", "imagenet"]


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = image_norm(norm, outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = image_norm(norm, outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, image_norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        activated: Tensor = self.relu(out + shortcut)
        return activated


class ResNet(nn.Module):
    """A residual network with torchvision's names: so many blocks a stage, channels doubling from `width`."""

    def __init__(
        self,
        blocks: tuple[int, ...],
        num_classes: int = 10,
        in_channels: int = 3,
        stem: Stem = "3x3",
        norm: Norm = "batch",
        width: int = 64,
    ) -> None:
        super().__init__()
        if stem not in get_args(Stem):
            raise UnknownNameError("stem", stem, get_args(Stem))
        large = stem == "imagenet"
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = image_norm(norm, width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        channels = width
        self.blocks = blocks
        for i, count in enumerate(blocks):
            outputs = width * 2**i
            first = Block(channels, outputs, 1 if i == 0 else 2, norm)
            rest = [Block(outputs, outputs, 1, norm) for _ in range(count - 1)]
            self.add_module(f"layer{i + 1}", nn.Sequential(first, *rest))
            channels = outputs
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def units(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Name of each unit and the sub-modules that it runs, in order."""
        blocks = [f"layer{i}.{j}" for i, count in enumerate(self.blocks, start=1) for j in range(count)]
        return (
            ("stem", ("conv1", "bn1", "relu", "maxpool")),
            *((name, (name,)) for name in blocks),
            ("head", ("avgpool", "flatten", "fc")),
        )

    def forward(self, x: Tensor) -> Tensor:
        for _, paths in self.units():
            for path in paths:
                x = self.get_submodule(path)(x)
        return x


def resnet18(
    num_classes: int = 10, in_channels: int = 3, stem: Stem = "3x3", norm: Norm = "batch", width: int = 64
) -> ResNet:
    """ResNet-18; the 3x3 stem is for small images, the ImageNet stem shrinks them fourfold first."""
    return ResNet((2, 2, 2, 2), num_classes, in_channels, stem, norm, width)


def resnet_tiny(
    num_classes: int = 10, in_channels: int = 1, stem: Stem = "3x3", norm: Norm = "batch", width: int = 4
) -> ResNet:
    """A residual network of a few thousand parameters, with all the features of a large one."""
    return ResNet((1, 1, 1), num_classes, in_channels, stem, norm, width)
