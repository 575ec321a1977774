"""A mean over clients that leaves out clients whose values are not finite."""

from functools import partial

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.servers import Keeper
from cutlayer.core.state import Grads
from cutlayer.core.sums import Weights
from cutlayer.core.tree import T, Tree
from cutlayer.core.values import Held, PerClient
from cutlayer.optim.rules import squared_norm


def mean_of(keeper: Keeper, rows: PerClient[T], ok: PerClient[Tensor], weights: Weights | None = None) -> Held[T]:
    """Return the mean over the clients that are `ok`; the rows of all others must be zero (`heard`, `or_zero`)."""
    chosen = [1.0 if weights is None else weights[j] for j in rows.ids]
    mean = keeper.mean(rows, weights)
    return keeper.do(partial(rescaled, sum(chosen)), mean, keeper.sum(ok, weights))


def heard(grads: Grads, ok: Tensor) -> Grads:
    """Return one client's share of the mean: zeros once it has stopped, and no gradient at the cut."""
    share: Grads = or_zero(grads._replace(cut=None), ok)
    return share


def or_zero(value: Tree, ok: Tensor) -> Tree:
    return tree.map(lambda a: torch.where(ok, a, torch.zeros_like(a)), value)


def all_finite(value: Tree) -> Tensor:
    return torch.stack([a.isfinite().all() for a in tree.tensors(value)]).all()


def loss_of_finite(grads: Grads) -> Tensor:
    """Return the loss, or NaN if a gradient is not finite, so that a part without parameters stops as well."""
    assert grads.loss is not None
    if not grads.params:
        return grads.loss
    return torch.where(squared_norm(grads.params).isfinite(), grads.loss, torch.nan)


def rescaled(num: float, mean: Tree, num_ok: Tensor) -> Tree:
    """Turn a mean over `num` clients into one over those that count; NaN if there are none, so nothing moves.

    With weights, both numbers are sums of weights.
    """

    def scaled(a: Tensor) -> Tensor:
        return a * (num / num_ok).to(a.dtype) if a.is_floating_point() else a

    return tree.map(scaled, mean)
