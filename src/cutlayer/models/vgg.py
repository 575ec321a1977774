"""VGG networks (Simonyan and Zisserman, 2015); a unit is a layer with weights and all that follows up to the next."""

from collections.abc import Iterable

from torch import nn

from cutlayer.errors import ConfigError
from cutlayer.models.norms import Norm, image_norm
from cutlayer.models.parts import Init, UnitNetwork, Units, init_convolutions, preset

Layer = tuple[str, list[nn.Module]]  # name of the unit, and its modules


class VGG(UnitNetwork):
    """A VGG network with `blocks` convolutions a block, each of which halves the image; torchvision's names.

    image_size=224 and classifier=(4096, 4096) give torchvision's shapes and dropout=0.5 its regularisation;
    vgg16 with norm="batch" is torchvision's vgg16_bn.
    """

    def __init__(
        self,
        blocks: tuple[int, ...],
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        norm: Norm = "none",
        width: int = 64,
        classifier: tuple[int, ...] = (512, 512),
        dropout: float = 0.0,
        init: Init = "he",
    ) -> None:
        super().__init__()
        smallest = 2 ** len(blocks)
        if image_size < smallest:
            raise ConfigError(
                f"image_size is {image_size}, but VGG halves an image {len(blocks)} times; "
                f"pad or resize the images to {smallest} or more"
            )
        places = min(7, image_size // smallest)  # torchvision always pools to 7, which is too many for a small image
        widths = [width * min(2**i, 8) for i in range(len(blocks))]
        convolutions = _convolutions(blocks, in_channels, widths, norm)
        dense = _dense(widths[-1] * places**2, classifier, num_classes, dropout)
        self.features = _sequence(convolutions)
        self.avgpool = nn.AdaptiveAvgPool2d(places)
        self.flatten = nn.Flatten()
        self.classifier = _sequence(dense)
        *units, (name, paths) = _units("features", convolutions)
        self._units = (*units, (name, (*paths, "avgpool", "flatten")), *_units("classifier", dense))
        init_convolutions(self, init)

    def units(self) -> Units:
        return self._units


def _convolutions(blocks: tuple[int, ...], channels: int, widths: list[int], norm: Norm) -> list[Layer]:
    layers: list[Layer] = []
    for block, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
        for number in range(1, count + 1):
            normalised = [] if norm == "none" else [image_norm(norm, width)]  # as in torchvision's numbering
            pooled = [nn.MaxPool2d(2)] if number == count else []
            conv = nn.Conv2d(channels, width, 3, padding=1)  # with a bias, as torchvision's have
            layers.append((f"conv{block}_{number}", [conv, *normalised, nn.ReLU(), *pooled]))
            channels = width
    return layers


def _dense(features: int, hidden: tuple[int, ...], num_classes: int, dropout: float) -> list[Layer]:
    layers: list[Layer] = []
    for number, size in enumerate(hidden, start=1):
        layers.append((f"fc{number}", [nn.Linear(features, size), nn.ReLU(), nn.Dropout(dropout)]))
        features = size
    return [*layers, ("head", [nn.Linear(features, num_classes)])]


def _sequence(layers: Iterable[Layer]) -> nn.Sequential:
    return nn.Sequential(*(module for _, modules in layers for module in modules))


def _units(path: str, layers: Iterable[Layer]) -> Units:
    """Return the units of a sequence, each with the paths of its modules."""
    units, start = [], 0
    for name, modules in layers:
        stop = start + len(modules)
        units.append((name, tuple(f"{path}.{i}" for i in range(start, stop))))
        start = stop
    return tuple(units)


vgg11 = preset("VGG-11: 8 convolutions and 3 fully connected layers.", VGG, (1, 1, 2, 2, 2))
vgg16 = preset("VGG-16: 13 convolutions and 3 fully connected layers.", VGG, (2, 2, 3, 3, 3))
