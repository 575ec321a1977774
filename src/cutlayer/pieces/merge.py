"""The rows of MergeSFL's merged batch: each client's share, and what keeps a stopped client from affecting others."""

from functools import partial

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.calculus import Crossing
from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Progress
from cutlayer.core.values import PerClient


def finite_or_zero(z: Crossing) -> Crossing:
    """Replace activations that are not finite: through the merged batch they would reach other clients."""
    ok = is_finite(z)
    return tree.map(lambda a: torch.where(ok, a, torch.zeros_like(a)), z)  # a mask of booleans stays one


def watched(progress: Progress, z: Crossing, loss: Tensor) -> Progress:
    ok = progress.ok & is_finite(z) & loss.isfinite()
    return Progress(torch.where(ok, progress.loss + loss, progress.loss), progress.steps + ok, ok)


def is_finite(z: Crossing) -> Tensor:
    return torch.stack([a.isfinite().all() for a in tree.tensors(z)]).all()


def in_share(gradient: Crossing, share: float, ok: Tensor) -> Crossing:
    """Scale a client's gradient by its share of the merged batch."""
    return tree.map(lambda g: torch.where(ok, g * share, 0), gradient)


def or_zeros(server: Server, rows: PerClient[Crossing], like: PerClient[Crossing]) -> PerClient[Crossing]:
    """Return the rows, with zeros for clients of `like` that disconnected after their activations were merged."""
    if rows.ids == like.ids:
        return rows
    filled = server.each(partial(tree.map, torch.zeros_like), like)
    filled[rows] = rows
    return filled


def while_any(grads: Grads, num_ok: Tensor) -> Grads:
    """Replace the gradients by NaN if no client is left, so that momentum does not keep moving the server."""
    return grads._replace(params={k: torch.where(num_ok > 0, g, torch.nan) for k, g in grads.params.items()})


def own_mean(cut: Crossing, share: float, ok: Tensor) -> Crossing:
    """Undo the share; a stopped client gets NaN, so that it does not move."""
    return tree.map(lambda g: torch.where(ok, g / share, torch.nan), cut)
