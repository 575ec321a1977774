"""A merged batch, row by row: each client's share, and what keeps a client that stopped away from the others."""

import torch
from torch import Tensor

from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Progress
from cutlayer.core.values import PerClient


def finite_or_zero(z: Tensor) -> Tensor:
    """A client whose activations are not finite must not reach the others through the merged batch."""
    return torch.where(z.isfinite().all(), z, 0)


def watched(progress: Progress, z: Tensor, loss: Tensor) -> Progress:
    ok = progress.ok & z.isfinite().all() & loss.isfinite()
    return Progress(torch.where(ok, progress.loss + loss, progress.loss), progress.steps + ok, ok)


def in_share(gradient: Tensor, share: float, ok: Tensor) -> Tensor:
    """A merged mean scales each client's gradient by its share of the batch."""
    return torch.where(ok, gradient * share, 0)


def or_zeros(server: Server, rows: PerClient[Tensor], like: PerClient[Tensor]) -> PerClient[Tensor]:
    """The rows, with zeros for those clients of `like` that were lost since their activations were merged."""
    if rows.ids == like.ids:
        return rows
    filled = server.each(torch.zeros_like, like)
    filled[rows] = rows
    return filled


def while_any(grads: Grads, num_ok: Tensor) -> Grads:
    """With no client left the server stands still as well, instead of coasting on its momentum."""
    return grads._replace(params={k: torch.where(num_ok > 0, g, torch.nan) for k, g in grads.params.items()})


def own_mean(cut: Tensor, share: float, ok: Tensor) -> Tensor:
    """Undo the share; NaN tells a client that has stopped to stand still."""
    return torch.where(ok, cut / share, torch.nan)
