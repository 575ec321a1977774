"""The shape and type of a sample, on which devices agree in advance, as none may see the data of another."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cutlayer.core.checks import check, check_count, is_number
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError, DataError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One input and its target, as every device of a run must hold them."""

    shape: tuple[int, ...]  # of one input, such as (3, 32, 32)
    classes: int | None = None  # None: not a classification
    dtype: str = "float32"  # of the inputs; int64 for tokens
    mean: tuple[float, ...] = ()  # of each channel (first dimension of an input); empty: no standardisation
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        sizes = isinstance(self.shape, tuple) and all(type(size) is int and size > 0 for size in self.shape)
        check(sizes and self.shape != (), "shape", self.shape, "whole numbers above 0, at least one")
        if self.classes is not None:
            check_count("classes", self.classes)
        check(self.dtype in DTYPES, "dtype", self.dtype, "float32, float64 or int64")
        for name, values in (("mean", self.mean), ("std", self.std)):
            fits = len(values) in (0, self.shape[0]) and all(is_number(value) for value in values)
            check(fits, name, values, f"{self.shape[0]} numbers, one a channel of the shape {self.shape}, or empty")
        check(all(value > 0 for value in self.std), "std", self.std, "numbers above 0")
        if bool(self.mean) != bool(self.std):
            raise ConfigError("mean and std belong together; give both of them or neither.")
        if self.mean and not self.is_float:
            raise ConfigError(f"mean and std need inputs of a float type, but dtype is {self.dtype!r}; leave them out.")

    @property
    def is_float(self) -> bool:
        return DTYPES[self.dtype].is_floating_point

    def checked(self, arrays: Arrays) -> Arrays:
        """Return samples converted to this type and these classes; refuse samples that do not fit."""
        if isinstance(arrays.x, dict):
            raise DataError(f"a sample has the inputs {', '.join(arrays.x)}; give one input of the shape {self.shape}")
        found = tuple(arrays.x.shape[1:])
        if found != self.shape:
            raise DataError(f"inputs have the shape {found}, but a sample here has {self.shape}; {self._mend(found)}")
        if self.classes is not None:
            check_labels(arrays.y, self.classes)
        if arrays.x.is_floating_point() and not self.is_float:
            raise DataError(f"the inputs have the type {arrays.x.dtype}, but they must be {self.dtype}; give integers")
        dtype = DTYPES[self.dtype]
        y = arrays.y.to(dtype) if self.is_float and arrays.y.is_floating_point() else arrays.y
        return finite(replace(arrays, x=arrays.x.to(dtype), y=y, num_classes=self.classes))

    def standardised(self, arrays: Arrays) -> Arrays:
        """Subtract each channel's mean and divide by its standard deviation, if they are given."""
        if not self.mean or isinstance(arrays.x, dict):
            return arrays
        mean, std = (
            torch.tensor(values, dtype=arrays.x.dtype, device=arrays.x.device).view(-1, *[1] * (len(self.shape) - 1))
            for values in (self.mean, self.std)
        )
        return replace(arrays, x=arrays.x.sub(mean).div_(std))

    def _mend(self, found: tuple[int, ...]) -> str:
        first, *rest = self.shape
        if rest and found == (*rest, first):
            return channels_first(len(found))
        if first == 1 and found == tuple(rest):
            return "give them their one channel: x[:, None]"
        return "bring them to that shape"


def channels_first(dims: int) -> str:
    """Say how to put the channels of samples of so many dimensions before the others."""
    return f"put the channels first: x.transpose{(0, dims, *range(1, dims))}"


def check_labels(y: Tensor, classes: int) -> None:
    """Refuse labels that are not one class number a sample."""
    if y.dim() != 1:
        raise DataError(f"labels have the shape {tuple(y.shape)}; give one number a sample")
    if y.is_floating_point():
        raise DataError(f"labels have the type {y.dtype}, but there are {classes} classes; give whole numbers from 0")
    wrong = ((y.long() < 0) | (y.long() >= classes)).nonzero()[:, 0]
    if len(wrong):
        raise DataError(
            f"{len(wrong)} of {len(y)} labels are out of range: {classes} classes have the labels 0 to {classes - 1}, "
            f"and sample {int(wrong[0])} has {int(y[wrong[0]])}; correct or remove them"
        )


def finite(arrays: Arrays) -> Arrays:
    """Return the same samples; refuse an empty set, and values that are not finite."""
    if not len(arrays):
        raise DataError("there are no samples; give at least one")
    inputs = arrays.x.values() if isinstance(arrays.x, dict) else [arrays.x]
    for what, values in (*(("inputs", x) for x in inputs), ("targets", arrays.y)):
        wrong = (~torch.isfinite(values).reshape(len(values), -1).all(dim=1)).nonzero()[:, 0]
        if len(wrong):
            raise DataError(
                f"{len(wrong)} of {len(values)} samples have {what} that are NaN or infinite in {values.dtype}, "
                f"the first of them sample {int(wrong[0])}; correct or remove them"
            )
    return arrays
