"""A model of one weight, and clients whose gradients of it are given, for numbers worked out by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cutlayer.data.arrays import Arrays


def mean_output(out: Tensor, y: Tensor) -> Tensor:
    """A loss whose gradient of the weight is the mean x."""
    return out.mean()


class Weight(nn.Sequential):
    """The output is w x; below a cut of 1 lies a unit without parameters."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__(nn.Identity(), nn.Linear(1, 1, bias=False))
        self.double()
        nn.init.constant_(self[1].weight, start)


def alike(x: Sequence[float], y: Sequence[float], sizes: Sequence[int]) -> Arrays:
    """Data in which all samples of a client are equal."""
    xs, ys = (torch.tensor(np.repeat(values, sizes), dtype=torch.float64) for values in (x, y))
    return Arrays(x=xs[:, None], y=ys)


def weight(values: Any) -> float:
    """Return the weight of a model or a part."""
    return float(values.params["1.weight"])
