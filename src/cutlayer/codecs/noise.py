"""Codecs that bound what a sample, or a client's update, can contribute, and add noise.

Noise protects only from those who do not know its key: what goes up is noised with the client's own seed, which
`cutlayer join --private-seed` makes a secret.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.checks import check, is_number
from cutlayer.core.codec import NOTHING, Code, Codec, as_it_is, codec
from cutlayer.core.text import short


@codec(drops=True, as_one_row=True)
@dataclass(frozen=True, kw_only=True)
class NormClip:
    """Scales each sample, or a model's whole change, down to a norm of at most this.

    Values are multiplied by min(1, norm / |x|), where |x| is the Euclidean norm (`order` 2) or the sum of magnitudes
    (`order` 1), and rounded to their type. Those that are not finite stay so.
    """

    norm: float
    order: int = 2

    def __post_init__(self) -> None:
        check(is_number(self.norm) and self.norm > 0, "norm", self.norm, "a number above 0")

    def __str__(self) -> str:
        return f"clip({short(self.norm)}{'' if self.order == 2 else f', order {self.order}'})"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        return _scaled(a, self.norm, self.order).to(a.dtype)

    decode = as_it_is


@codec(draws=True, drops=True, as_one_row=True, noisy=True)
@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Clips to the Euclidean norm `clip`, if given, and adds normal noise of this standard deviation."""

    std: float
    clip: float | None = None

    def __post_init__(self) -> None:
        _check("std", self.std, self.clip)

    def __str__(self) -> str:
        return f"gaussian({short(self.std)}{'' if self.clip is None else f', clip {short(self.clip)}'})"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        noise = directions.normals(key, 0, a.numel()).view(a.shape) * self.std
        return (_clipped(a, self.clip, 2) + noise).to(a.dtype)

    decode = as_it_is


@codec(draws=True, drops=True, as_one_row=True, noisy=True)
@dataclass(frozen=True, kw_only=True)
class Laplace:
    """Clips the sum of magnitudes to `clip`, if given, and adds Laplace noise of this scale."""

    scale: float
    clip: float | None = None

    def __post_init__(self) -> None:
        _check("scale", self.scale, self.clip)

    def __str__(self) -> str:
        return f"laplace({short(self.scale)}{'' if self.clip is None else f', clip {short(self.clip)}'})"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        numbers = torch.arange(a.numel(), device=a.device)
        high, low = directions.halves(directions.mixed(directions.mixed(key) + directions.GOLDEN * numbers))
        size = directions.log((high + 1).double() / 2.0**32) * -self.scale
        noise = torch.where(low % 2 == 0, size, -size).view(a.shape)
        return (_clipped(a, self.clip, 1) + noise).to(a.dtype)

    decode = as_it_is


def clip(*, norm: float) -> NormClip:
    """Each sample, or a model's change, scaled down to this Euclidean norm where it is longer."""
    return NormClip(norm=norm)


def gaussian(*, std: float, clip: float | None = None) -> Codec:
    """Normal noise of this standard deviation added, after a clip of the Euclidean norm if `clip` is given."""
    return _noisy(Gaussian(std=std, clip=clip), std, clip, 2)


def laplace(*, scale: float, clip: float | None = None) -> Codec:
    """Laplace noise of this scale added, after a clip of the sum of magnitudes if `clip` is given."""
    return _noisy(Laplace(scale=scale, clip=clip), scale, clip, 1)


def _noisy(made: Codec, size: float, clip: float | None, order: int) -> Codec:
    """Return a codec of noise; without noise, the clip alone, or nothing."""
    if size:
        return made
    return NOTHING if clip is None else NormClip(norm=clip, order=order)


def _check(name: str, size: object, clip: object) -> None:
    check(is_number(size) and size >= 0, name, size, "a number from 0 up")
    check(clip is None or (is_number(clip) and clip > 0), "clip", clip, "a number above 0")


def _clipped(a: Tensor, norm: float | None, order: int) -> Tensor:
    return a.double() if norm is None else _scaled(a, norm, order)


def _scaled(a: Tensor, norm: float, order: int) -> Tensor:
    """Return float64 rows whose norm of this order is at most `norm`; rows that are short enough do not change."""
    rows = a.flatten(1).double()
    largest = rows.abs().amax(1, keepdim=True)  # divided by it, no square overflows
    unit = rows / torch.where(largest == 0, 1.0, largest)
    root = directions.sqrt(_sum(unit * unit)) if order == 2 else _sum(unit.abs())
    longer = largest * root > norm  # not if a value is not finite: then the root is NaN
    wanted = norm * (1 - torch.finfo(a.dtype).eps)  # rounded to the type again, no row is longer than the norm
    return torch.where(longer, unit * (torch.full_like(root, wanted) / root), rows).view(a.shape)


def _sum(rows: Tensor) -> Tensor:
    """Add each row's numbers in pairs, in an order that is the same on every device."""
    width = 1 << max(rows.size(1) - 1, 0).bit_length()
    rows = torch.nn.functional.pad(rows, (0, width - rows.size(1)))
    while rows.size(1) > 1:
        half = rows.size(1) // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows
