"""Estimates of what the convergence bound needs: smoothness, and each unit's gradient norm and noise.

With the gradient g of a client's mini-batch of b samples, and g' and g'' those of its two halves, unit j has

    G_j^2     = ||g_j||^2                      squared norm
    sigma_j^2 = b ||g'_j - g''_j||^2 / 4       variance of one sample's gradient, as E||g' - g''||^2 = 4 sigma^2 / b
    beta      = ||g(w) - g(v)|| / ||w - v||    how fast gradients change between two weights, on the same samples

Everything here is tensor arithmetic without a branch on values, so it works for one client and under `vmap`.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LEAST_SMOOTHNESS = 1e-5
LEAST_DISTANCE = 1e-10  # below it two weights are the same ones


def unit_norms(unit_params: Sequence[Sequence[str]], tensors: Mapping[str, Tensor]) -> Tensor:
    """G_j^2 of each unit, from gradients by the names of parameters; a name that is missing counts as zero."""
    none = next(iter(tensors.values())).new_zeros(()) if tensors else torch.zeros(())
    squares = {name: value.square().sum() for name, value in tensors.items()}
    return torch.stack([sum((squares[name] for name in names if name in squares), none) for names in unit_params])


def noise(
    unit_params: Sequence[Sequence[str]],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    size: int | Tensor,
) -> Tensor:
    """sigma_j^2 of each unit, from the gradients of the two halves of a batch of this size."""
    return size / 4 * unit_norms(unit_params, {name: value - second[name] for name, value in first.items()})


def smoothness(change2: Tensor, distance2: Tensor) -> Tensor:
    """beta from squared norms: of the difference of gradients and of that of the weights they were taken at.

    The smallest value it may have where the weights are the same; not a number where the gradients are not finite.
    """
    apart = distance2.sqrt() >= LEAST_DISTANCE
    ratio = change2.sqrt() / torch.where(apart, distance2.sqrt(), 1.0)
    return torch.where(apart, ratio, 0.0).clamp(min=LEAST_SMOOTHNESS)


def smoothed(old: Tensor, new: Tensor, keep: float) -> Tensor:
    """The exponential average keep * old + (1 - keep) * new; of the two, one that is not finite is ignored."""
    mean = keep * old + (1 - keep) * new
    return torch.where(new.isfinite(), torch.where(old.isfinite(), mean, new), old)
