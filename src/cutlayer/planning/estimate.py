"""Estimates for the convergence bound: smoothness, and the gradient norm and noise of each unit.

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
    """Return G_j^2 of each unit from gradients by parameter name; a missing name counts as zero."""
    none = next(iter(tensors.values())).new_zeros(()) if tensors else torch.zeros(())
    squares = {name: value.square().sum() for name, value in tensors.items()}
    return torch.stack([sum((squares[name] for name in names if name in squares), none) for names in unit_params])


def noise(
    unit_params: Sequence[Sequence[str]],
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    size: int | Tensor,
) -> Tensor:
    """Return sigma_j^2 of each unit from the gradients of the two halves of a batch of this size."""
    return size / 4 * unit_norms(unit_params, {name: value - second[name] for name, value in first.items()})


def smoothness(change2: Tensor, distance2: Tensor) -> Tensor:
    """Return beta from the squared norms of a difference of gradients and of the difference of their weights.

    It is LEAST_SMOOTHNESS if the weights are the same, and NaN if the gradients are not finite.
    """
    apart = distance2.sqrt() >= LEAST_DISTANCE
    ratio = change2.sqrt() / torch.where(apart, distance2.sqrt(), 1.0)
    return torch.where(apart, ratio, 0.0).clamp(min=LEAST_SMOOTHNESS)


def smoothed(old: Tensor, new: Tensor, keep: float) -> Tensor:
    """Return the exponential average keep * old + (1 - keep) * new; a value that is not finite is ignored."""
    mean = keep * old + (1 - keep) * new
    return torch.where(new.isfinite(), torch.where(old.isfinite(), mean, new), old)
