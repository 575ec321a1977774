"""Codecs that round: to bfloat16, or to whole numbers of 8 or 4 bits with scales."""

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from cutlayer.core.checks import check_choice
from cutlayer.core.codec import Code, codec
from cutlayer.errors import WireError

Per = Literal["sample", "channel", "feature", "tensor"]
TINY = torch.finfo(torch.float32).tiny  # the smallest scale: a subnormal one would be too coarse


@codec()
@dataclass(frozen=True)
class Bf16:
    """Rounds to bfloat16: half the bytes of float32, with a relative error of at most 2^-8.

    Tensors of 16 bits stay as they are. A finite number beyond the range of bfloat16 becomes infinite.
    """

    def __str__(self) -> str:
        return "bf16"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        return a.bfloat16() if a.element_size() > 2 else a

    def decode(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor: Tensor = code.to(dtype)
        return tensor


@codec()
@dataclass(frozen=True, kw_only=True)
class Integers:
    """Rounds to whole numbers from -127 to 127, or from -7 to 7, times a scale.

    The scale is the largest magnitude divided by 127 (or 7), as float32; the error is at most half of it. There is one
    for each `sample` (of a model: for each tensor), for each `channel` (the second axis) or `feature` (the last axis)
    of a sample, or for the whole `tensor`. A value that is not finite makes all that share its scale not finite; so
    does a float64 value whose scale is beyond the range of float32.
    """

    bits: Literal[4, 8]
    per: Per = "sample"

    def __post_init__(self) -> None:
        check_choice("per", self.per, Per, str(self))

    def __str__(self) -> str:
        return f"int{self.bits}" + ("" if self.per == "sample" else f"(per {self.per})")

    @property
    def most(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def encode(self, a: Tensor, key: Tensor) -> Code:
        shared, wide = self._shared(a.dim()), _wide(a.dtype)
        largest = torch.maximum(a.amax(shared, keepdim=True), -a.amin(shared, keepdim=True))
        # Multiplied: some devices round a division by a plain number, or a compiled one, in their own way.
        scales = (largest.double() * (1 / self.most)).float()
        scales = torch.where(scales.isinf(), scales, scales.clamp(TINY, self._largest_scale(a.dtype)))
        integers = a.to(wide) * (1 / scales.double()).to(wide)
        whole = integers.round_().nan_to_num_(nan=0.0).to(torch.int8)
        return {"integers": whole if self.bits == 8 else _paired(whole.flatten(1)), "scales": scales}

    def decode(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole, wide = code["integers"], _wide(dtype)
        if self.bits == 4:
            whole = _unpaired(whole)[:, : prod(shape[1:])].reshape(shape)
        product: Tensor = whole.to(wide).mul_(code["scales"].to(wide))
        return product.to(dtype)

    def check(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        scales, whole = code["scales"], code["integers"]
        if bool(((scales < TINY) | (scales > self._largest_scale(dtype)) & scales.isfinite()).any()):
            raise WireError(f"a scale of {self} is too small or too large")
        padding = whole[:, prod(shape[1:]) // 2 :] >> 4 if self.bits == 4 and prod(shape[1:]) % 2 else whole[:0]
        least = (whole if self.bits == 8 else _unpaired(whole)).amin()
        if int(least) < -self.most or bool(padding.any()):
            raise WireError(f"a whole number of {self} is below -{self.most}, or its padding is not zero")

    def _largest_scale(self, dtype: torch.dtype) -> float:
        """Return the largest scale whose multiples do not overflow when they are rounded to the type."""
        return min(torch.finfo(dtype).max / self.most * (1 - 2**-22), torch.finfo(torch.float32).max)

    def _shared(self, dims: int) -> tuple[int, ...]:
        """Return the axes along which a scale is shared; of two axes, a sample is one vector and has one scale."""
        if self.per == "tensor":
            return tuple(range(dims))
        own = {"channel": 1, "feature": dims - 1}.get(self.per)
        return tuple(d for d in range(1, dims) if d != own or dims == 2)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _paired(whole: Tensor) -> Tensor:
    """Put two numbers of 4 bits into a byte, the first into the lower half."""
    padded = torch.nn.functional.pad(whole, (0, whole.size(1) % 2))
    return ((padded[:, 1::2] << 4) | (padded[:, 0::2] & 15)).to(torch.uint8)


def _unpaired(pairs: Tensor) -> Tensor:
    both = pairs.to(torch.int8)  # a shift to the right keeps the sign
    return torch.stack(((both << 4) >> 4, both >> 4), dim=2).flatten(1)


def int8(*, per: Per = "sample") -> Integers:
    """Whole numbers of 8 bits and a scale for each sample: a quarter of the bytes of float32."""
    return Integers(bits=8, per=per)


def int4(*, per: Per = "sample") -> Integers:
    """Whole numbers of 4 bits and a scale for each sample: an eighth of the bytes of float32."""
    return Integers(bits=4, per=per)
