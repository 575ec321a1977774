"""Differentiation of one client's function, or of many side by side: plain autograd around the forward pass.

Backward passes run outside `vmap`, on the stacked tensors themselves: the same numbers, without its overhead.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutlayer import tree
from cutlayer.state import Grads

Pull = Callable[[Tensor], Grads]


def vjp(run: Callable[..., tuple[Tensor, Any]], args: list[Any], cut: int | None) -> tuple[Tensor, Pull]:
    """The output of run(*args) and its pullback.

    The pullback gives the gradients of the parameters of args[0], if it is a part, and of args[cut], if asked for.
    """
    params = {k: v.detach().requires_grad_() for k, v in getattr(args[0], "params", {}).items()}
    args = [args[0]._replace(params=params) if params else args[0], *args[1:]]
    if cut is not None:
        args[cut] = args[cut].detach().requires_grad_()
    with torch.enable_grad():
        out, buffers = run(*args)
    buffers = tree.detach(buffers)
    inputs = [*params.values(), *([args[cut]] if cut is not None else [])]

    def pull(gradient: Tensor) -> Grads:
        if not out.requires_grad:  # nothing was trainable on the way, as in an empty client
            return Grads({}, buffers)
        found = torch.autograd.grad(out, inputs, gradient, allow_unused=True)
        by_name = {k: g for k, g in zip(params, found, strict=False) if g is not None}
        return Grads(by_name, buffers, cut=found[-1] if cut is not None else None)

    return out.detach(), pull


def gradient(run: Callable[..., tuple[Tensor, Any]], args: list[Any], cut: int | None) -> Grads:
    """Gradients of a loss, with the loss. A loss that is not finite gives NaN, so the parts it reaches stop."""
    loss, pull = vjp(run, args, cut)
    seed = torch.where(loss.isfinite(), 1.0, torch.nan).to(loss.dtype)
    return pull(seed)._replace(loss=loss)
