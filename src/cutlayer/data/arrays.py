"""Samples in memory: inputs, targets and optional groups; the first dimension of each is the samples."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cutlayer import registry
from cutlayer.core import tree
from cutlayer.core.keys import generator
from cutlayer.errors import ConfigError, DataError

Inputs = Tensor | dict[str, Tensor]
IGNORED = -100  # an integer target that torch's cross entropy leaves out, such as that of a padded position
Index = Tensor | NDArray[Any] | Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrays:
    """Inputs x and targets y of the same samples, checked once when they are created.

    A sample's group says where it comes from: a speaker, a writer, a role in a play. The natural partition makes each
    group a client.
    """

    x: Inputs
    y: Tensor
    num_classes: int | None = None  # None: not a classification; labels are below it, or -100 to be ignored
    groups: Tensor | None = None  # the group of each sample, an index into the names
    group_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in named_inputs(self.x):
            _check_length(name, value, self.y)
        if self.num_classes is not None:
            _check_labels(self.y, self.num_classes)
        if self.groups is not None:
            _check_groups(self.groups, self.group_names, len(self.y))

    def __len__(self) -> int:
        return len(self.y)

    def __repr__(self) -> str:
        inputs = " and ".join(f"{name} {_form(value)}" for name, value in named_inputs(self.x))
        targets = f"y {_form(self.y)}" if self.num_classes is None else f"{self.num_classes} classes"
        return f"Arrays({len(self)} samples: {inputs}, {targets})"

    def take(self, index: Index) -> "Arrays":
        """Return the samples of these indices (or of a mask), in that order."""
        rows = torch.as_tensor(index, device=self.y.device)
        if not rows.numel():
            rows = rows.long()  # torch gives an empty list a float type
        return self._mapped(lambda a: a[rows.to(a.device)])

    def to(self, device: torch.device | str) -> "Arrays":
        """Return the same samples on another device."""
        return self._mapped(lambda a: a.to(device))

    def cast(self, dtype: torch.dtype) -> "Arrays":
        """Return the same samples with floating-point inputs and targets in this type; integers stay."""
        return self._mapped(lambda a: a.to(dtype) if a.is_floating_point() else a)

    def of_groups(self, names: Collection[str]) -> "Arrays":
        """Return the samples of the groups of these names, in their old order."""
        if self.groups is None:
            raise DataError("the samples have no groups to choose from; give each sample its group")
        index = {name: i for i, name in enumerate(self.group_names)}
        chosen = [registry.find("group", index, name) for name in names]
        return self.take(torch.isin(self.groups, torch.tensor(chosen, dtype=torch.int64, device=self.groups.device)))

    def _mapped(self, fn: Callable[[Tensor], Tensor]) -> "Arrays":
        # A copy skips the checks of __post_init__: the values stay valid, and checks would wait for the device.
        new = copy.copy(self)
        object.__setattr__(new, "x", tree.map(fn, self.x))
        object.__setattr__(new, "y", fn(self.y))
        if self.groups is not None:
            object.__setattr__(new, "groups", fn(self.groups))
        return new


def named_inputs(x: Any) -> list[tuple[str, Any]]:
    """Return inputs with their names in messages."""
    return [(f"x[{key!r}]", value) for key, value in x.items()] if isinstance(x, Mapping) else [("x", x)]


def _form(value: Tensor) -> str:
    """Return the shape and type of one sample's value."""
    return " ".join(["x".join(str(n) for n in value.shape[1:]), str(value.dtype).removeprefix("torch.")]).strip()


def _check_length(name: str, value: Tensor, y: Tensor) -> None:
    if not value.dim() or not y.dim():
        raise DataError(
            f"{name if not value.dim() else 'y'} is a single number; its first dimension must be the samples"
        )
    if len(value) != len(y):
        raise DataError(
            f"{name} has {len(value)} samples and y has {len(y)}; give each sample one input and one target"
        )


def _check_labels(y: Tensor, num_classes: int) -> None:
    if num_classes < 1:
        raise DataError(f"num_classes is {num_classes}; give at least 1, or None for data that is not a classification")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise DataError(f"labels have the type {y.dtype}; give integers, or no num_classes for a regression")
    wrong = (((y < 0) & (y != IGNORED)) | (y >= num_classes)).nonzero()
    if len(wrong):
        place = tuple(int(i) for i in wrong[0])
        raise DataError(
            f"label {int(y[place])} of sample {place[0]} is out of range: "
            f"{num_classes} classes have the labels 0 to {num_classes - 1}"
        )


def _check_groups(groups: Tensor, names: tuple[str, ...], num_samples: int) -> None:
    if groups.shape != (num_samples,) or groups.dtype != torch.int64:
        raise DataError(
            f"groups have the type {groups.dtype} and the shape {tuple(groups.shape)} for {num_samples} samples; "
            "give one int64 a sample"
        )
    if num_samples and not 0 <= int(groups.min()) <= int(groups.max()) < len(names):
        raise DataError(
            f"groups go from {int(groups.min())} to {int(groups.max())}, but there are {len(names)} group names; "
            "give each group a name and each sample the index of one"
        )


def from_arrays(x: Any, y: Any, num_classes: int | None = None, *, groups: Sequence[Any] | None = None) -> Arrays:
    """Make Arrays from numpy arrays, tensors or a dict of them.

    uint8 inputs are images: they become float32 in [0, 1]. Other numpy inputs become float32 (from float64) or int64
    (from integers); other tensors keep their type. Integer targets become int64. If they are one number a sample (or a
    column of them) and num_classes is not given, the classes are 0 to their maximum: give num_classes if a class may be
    absent. Float targets make a regression. Integer targets of more dimensions (tokens) have no classes unless given.
    `groups` is one name or number a sample.
    """
    inputs = {str(k): _input(v, f"x[{k!r}]") for k, v in x.items()} if isinstance(x, Mapping) else _input(x, "x")
    targets = _tensor(y, "y")
    if not targets.is_floating_point():
        targets = targets.long()
        if targets.dim() == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        if num_classes is None and targets.dim() == 1 and len(targets):
            num_classes = max(int(targets.max()) + 1, 1)
    arrays = Arrays(x=inputs, y=targets, num_classes=num_classes)
    if groups is None:
        return arrays
    names, index = np.unique(np.asarray(groups), return_inverse=True)
    numbers = torch.from_numpy(index.astype(np.int64))
    return replace(arrays, groups=numbers, group_names=tuple(str(name) for name in names))


def _input(value: Any, name: str) -> Tensor:
    tensor = _tensor(value, name)
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


def _tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)
    if array.dtype.kind == "f" and array.itemsize > 4:
        return torch.tensor(array, dtype=torch.float32)
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        return torch.tensor(array.astype(np.int64))
    if array.dtype.kind not in "fbu":
        raise DataError(f"{name} has the type {array.dtype}; give numbers")
    return torch.tensor(array)


def split_off(arrays: Arrays, fraction: float, key: int) -> tuple[Arrays, Arrays]:
    """Hold out a random fraction of the samples: return (rest, held out), at least one each, in their old order."""
    if not 0 < fraction < 1:
        raise ConfigError(f"cannot hold out a fraction of {fraction}; give a number between 0 and 1")
    if len(arrays) < 2:
        raise DataError(f"cannot split {len(arrays)} samples in two; give at least 2")
    num_held = min(max(round(fraction * len(arrays)), 1), len(arrays) - 1)
    order = generator(key, "split_off").permutation(len(arrays))
    return arrays.take(np.sort(order[num_held:])), arrays.take(np.sort(order[:num_held]))
