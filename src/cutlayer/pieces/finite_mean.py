"""A mean over clients that a client with values that are not finite does not spoil."""

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
    """The mean over the clients that are heard, of rows that are zero for all others (`heard`, `or_zero`)."""
    chosen = [1.0 if weights is None else weights[j] for j in rows.ids]
    mean = keeper.mean(rows, weights)
    return keeper.do(partial(rescaled, sum(chosen)), mean, keeper.sum(ok, weights))


def heard(grads: Grads, ok: Tensor) -> Grads:
    """One client's share of the mean: nothing once it has stopped. The gradient at the cut is no part of it."""
    share: Grads = or_zero(grads._replace(cut=None), ok)
    return share


def or_zero(value: Tree, ok: Tensor) -> Tree:
    return tree.map(lambda a: torch.where(ok, a, torch.zeros_like(a)), value)


def all_finite(value: Tree) -> Tensor:
    return torch.stack([a.isfinite().all() for a in tree.tensors(value)]).all()


def loss_of_finite(grads: Grads) -> Tensor:
    """The loss; not a number where a gradient is none, so that the client stops wherever it holds no parameters."""
    assert grads.loss is not None
    if not grads.params:
        return grads.loss
    return torch.where(squared_norm(grads.params).isfinite(), grads.loss, torch.nan)


def rescaled(num: float, mean: Tree, num_ok: Tensor) -> Tree:
    """The mean over `num` clients as one over those that count; not a number where there are none, so nothing moves.

    Where clients weigh differently, both are sums of weights.
    """

    def scaled(a: Tensor) -> Tensor:
        return a * (num / num_ok).to(a.dtype) if a.is_floating_point() else a

    return tree.map(scaled, mean)
