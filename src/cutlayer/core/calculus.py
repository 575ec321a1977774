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

Crossing = Any  # what crosses a cut: a tensor, or a dict of tensors by name
ALONE = ""  # the name of a tensor that crosses the cut alone
Pull = Callable[..., Grads]  # of the gradient of the output; with again=True it can be called once more


class Pullback(NamedTuple):
    """A pullback and the clients that it was made for."""

    pull: Pull
    clients: tuple[int, ...]


def vjp(run: Callable[..., tuple[Any, Any]], args: list[Any], cut: int | None) -> tuple[Any, Pull]:
    """Return the output of run(*args) and its pullback.

    The output and args[cut], if given, hold tensors. The pullback takes the gradient of the output and returns the
    gradients of the parameters of args[0], if it is a part, and of args[cut]. The gradient of several tensors is a dict
    by name, and lacks those that have none, such as a mask.
    """
    given: Tensors = getattr(args[0], "params", {})
    params = named.leaves(given)
    args = [args[0]._replace(params=params) if params else args[0], *args[1:]]
    if cut is not None:
        args[cut] = tree.map(_differentiable, args[cut])
    with torch.enable_grad():
        out, buffers = run(*args)
    outputs, buffers = by_name(out), tree.detach(buffers)
    crossed = {} if cut is None else {k: a for k, a in by_name(args[cut]).items() if a.requires_grad}
    inputs = [*params.values(), *crossed.values()]

    def pull(gradient: Any, *, again: bool = False) -> Grads:
        known = {k: g for k, g in by_name(gradient).items() if outputs[k].requires_grad}
        if not known:  # nothing trains here, as in an empty client
            return Grads({}, buffers)
        ends = [outputs[k] for k in known]
        found = torch.autograd.grad(ends, inputs, list(known.values()), allow_unused=True, retain_graph=again)
        params_found = {k: g for k, g in zip(params, found, strict=False) if g is not None}
        at_cut = {k: g for k, g in zip(crossed, found[len(params) :], strict=True) if g is not None}
        whole = None if cut is None else at_cut.get(ALONE) if isinstance(args[cut], Tensor) else at_cut
        return Grads(named.typed(given, params_found), buffers, cut=whole)

    return tree.detach(out), pull


def by_name(value: Any) -> Tensors:
    """Return the tensors of a value by name: the keys and places that lead there, or `ALONE` for a single tensor."""
    if isinstance(value, Tensor):
        return {ALONE: value}
    nested = enumerate(value) if isinstance(value, tree.NESTED) else ()
    items: Any = value.items() if isinstance(value, dict) else nested
    return {f"{key}.{rest}" if rest else key: a for key, item in items for rest, a in by_name(item).items()}


def crossing(value: Any) -> Tensors:
    """Return the tensors that cross a cut by name; refuse what cannot cross."""
    if not isinstance(value, Tensor) and not (isinstance(value, dict) and by_name(value).keys() == value.keys()):
        raise CutError(
            f"a {type(value).__name__} cannot cross the cut; let the unit below it return a tensor, or a dict of "
            "tensors"
        )
    if any(a.is_complex() for a in by_name(value).values()):
        raise CutError("a complex tensor cannot cross the cut; cut elsewhere, or let torch.view_as_real cross")
    return by_name(value)


def _differentiable(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def gradient(run: Callable[..., tuple[Tensor, Any]], args: list[Any], cut: int | None) -> Grads:
    """Return the loss and its gradients. If the loss is not finite they are NaN, so the parts that get them stop."""
    loss, pull = vjp(run, args, cut)
    seed = torch.where(loss.isfinite(), 1.0, torch.nan).to(loss.dtype)
    return pull(seed)._replace(loss=loss)


def check_pullback(value: PerClient) -> None:
    """Refuse a value that is not a pullback of `vjp`: any other function must be called by name."""
    if not all(isinstance(b.tree, Pullback) for b in value.blocks):
        raise LawError("this value is no pullback of `vjp`, so it cannot be run; name a function that is declared")
