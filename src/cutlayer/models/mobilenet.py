"""MobileNetV2 (Sandler et al., 2018); a unit is the stem, an inverted-residual block or the head."""

from typing import Literal

from torch import Tensor, nn

from cutlayer import registry
from cutlayer.models.norms import Norm, image_norm
from cutlayer.models.parts import Init, UnitNetwork, Units, init_convolutions

SmallStem = Literal["3x3", "imagenet"]
STRIDES = {"3x3": 1, "imagenet": 2}
# fmt: off
STAGES = (  # expansion, channels, blocks, stride of the first block
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)
# fmt: on


class InvertedResidual(nn.Module):
    """A 1x1 convolution widens, a depthwise 3x3 filters, a 1x1 narrows; with a residual connection if shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        inner = inputs * expansion
        widen = [_convolution(inputs, inner, 1, 1, norm)] if expansion != 1 else []
        depthwise = _convolution(inner, inner, 3, stride, norm, groups=inner)
        narrow = nn.Conv2d(inner, outputs, 1, bias=False)
        self.conv = nn.Sequential(*widen, depthwise, narrow, image_norm(norm, outputs))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.residual else out


class MobileNetV2(UnitNetwork):
    """MobileNetV2: 17 inverted-residual blocks; the ImageNet stem halves the image, the 3x3 stem does not.

    The names are torchvision's; `width` multiplies the number of channels.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        stem: SmallStem = "3x3",
        norm: Norm = "batch",
        width: float = 1.0,
        dropout: float = 0.0,
        init: Init = "he",
    ) -> None:
        super().__init__()
        channels = _scaled(32, width)
        layers: list[nn.Module] = [_convolution(in_channels, channels, 3, registry.find("stem", STRIDES, stem), norm)]
        for expansion, base, count, first_stride in STAGES:
            outputs = _scaled(base, width)
            for number in range(count):
                stride = first_stride if number == 0 else 1
                layers.append(InvertedResidual(channels, outputs, stride, expansion, norm))
                channels = outputs
        last = _scaled(1280, max(1.0, width))
        self.features = nn.Sequential(*layers, _convolution(channels, last, 1, 1, norm))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))
        init_convolutions(self, init)

    def units(self) -> Units:
        end = len(self.features) - 1
        return (
            ("stem", ("features.0",)),
            *((f"block{i}", (f"features.{i}",)) for i in range(1, end)),
            ("head", (f"features.{end}", "avgpool", "flatten", "classifier")),
        )


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, norm: Norm, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, image_norm(norm, outputs), nn.ReLU6())


def _scaled(channels: int, width: float) -> int:
    """Return the multiple of 8 nearest to channels * width, but at least 0.9 of it."""
    wanted = channels * width
    nearest = max(8, int(wanted + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * wanted else nearest


mobilenet_v2 = MobileNetV2
