"""Differentiation for one client or for a stack of clients: plain autograd around the forward pass.

Backward passes run outside `vmap`, on the stacked tensors: the same numbers without the overhead of `vmap`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlayer.core import named, tree
from cutlayer.core.state import Grads, Tensors
from cutlayer.core.values import PerClient
from cutlayer.errors import CutError, LawError

Pull = Callable[..., Grads]  # of the gradient of the output; with again=True it can be called once more


class Pullback(NamedTuple):
    """A pullback and the clients that it was made for."""

    pull: Pull
    clients: tuple[int, ...]


def vjp(run: Callable[..., tuple[Tensor, Any]], args: list[Any], cut: int | None) -> tuple[Tensor, Pull]:
    """Return the output of run(*args) and its pullback.

    The pullback returns the gradients of the parameters of args[0], if it is a part, and of args[cut], if given.
    """
    given: Tensors = getattr(args[0], "params", {})
    params = named.leaves(given)
    args = [args[0]._replace(params=params) if params else args[0], *args[1:]]
    if cut is not None:
        args[cut] = args[cut].detach().requires_grad_()
    with torch.enable_grad():
        out, buffers = run(*args)
    if not isinstance(out, Tensor):
        raise CutError("what crosses the cut is no single tensor, but a dict of inputs; cut after the first unit")
    buffers = tree.detach(buffers)
    inputs = [*params.values(), *([args[cut]] if cut is not None else [])]

    def pull(gradient: Tensor, *, again: bool = False) -> Grads:
        if not out.requires_grad:  # nothing trains here, as in an empty client
            return Grads({}, buffers)
        found = torch.autograd.grad(out, inputs, gradient, allow_unused=True, retain_graph=again)
        by_name = {k: g for k, g in zip(params, found, strict=False) if g is not None}
        return Grads(named.typed(given, by_name), buffers, cut=found[-1] if cut is not None else None)

    return out.detach(), pull


def gradient(run: Callable[..., tuple[Tensor, Any]], args: list[Any], cut: int | None) -> Grads:
    """Return the loss and its gradients. If the loss is not finite they are NaN, so the parts that get them stop."""
    loss, pull = vjp(run, args, cut)
    seed = torch.where(loss.isfinite(), 1.0, torch.nan).to(loss.dtype)
    return pull(seed)._replace(loss=loss)


def check_pullback(value: PerClient) -> None:
    """Refuse a value that is not a pullback of `vjp`: any other function must be called by name."""
    if not all(isinstance(b.tree, Pullback) for b in value.blocks):
        raise LawError("this value is no pullback of `vjp`, so it cannot be run; name a function that is declared")
