"""Common parts of the networks of the zoo: stems, initial weights, and the forward pass through units."""

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar, get_args

from torch import Tensor, nn

from cutlayer import registry
from cutlayer.errors import UnknownNameError
from cutlayer.models.norms import Norm, image_norm

Stem = Literal["3x3", "7x7", "imagenet"]
Init = Literal["he", "torch"]  # initial weights: He's, or those of torch's layers
Units: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]  # name of each unit and the sub-modules that it runs
STEMS = {"3x3": (3, 1, False), "7x7": (7, 2, False), "imagenet": (7, 2, True)}  # kernel, stride, pooled?

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


def image_stem(
    stem: Stem, in_channels: int, channels: int, norm: Norm
) -> tuple[nn.Conv2d, nn.Module, nn.Module, nn.Module]:
    """Return convolution, normalisation, activation and pooling in front of the first block."""
    kernel, stride, pooled = registry.find("stem", STEMS, stem)
    conv = nn.Conv2d(in_channels, channels, kernel, stride, padding=kernel // 2, bias=False)
    pool = nn.MaxPool2d(3, stride=2, padding=1) if pooled else nn.Identity()
    return conv, image_norm(norm, channels), nn.ReLU(), pool


def draws_he(init: Init) -> bool:
    """Return whether a network replaces torch's initial weights by its own."""
    if init not in get_args(Init):
        raise UnknownNameError("init", init, get_args(Init))
    return init == "he"


def init_convolutions(model: nn.Module, init: Init, mode: Literal["fan_in", "fan_out"] = "fan_out") -> None:
    """Draw the weights of convolutions from He's normal and zero their biases; `torch` keeps what torch drew."""
    if not draws_he(init):
        return
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class UnitNetwork(nn.Module):
    """A model that runs its units one after another."""

    def units(self) -> Units:
        """Return the name of each unit and the sub-modules that it runs, in order."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for _, paths in self.units():
            for path in paths:
                x = self.get_submodule(path)(x)
        return x


def preset(about: str, network: Callable[Concatenate[A, P], T], plan: A) -> Callable[P, T]:
    """Return a network with its first argument fixed; its other options stay open."""
    model: Any = partial(network, plan)
    model.__doc__ = about
    return model  # type: ignore[no-any-return]
