"""The rows of MergeSFL's merged batch: each client's share, and what keeps a stopped client from affecting others."""

import torch
from torch import Tensor

from cutlayer.core.servers import Server
from cutlayer.core.state import Grads, Progress
from cutlayer.core.values import PerClient


def finite_or_zero(z: Tensor) -> Tensor:
    """Replace activations that are not finite: through the merged batch they would reach other clients."""
    return torch.where(z.isfinite().all(), z, 0)


def watched(progress: Progress, z: Tensor, loss: Tensor) -> Progress:
    ok = progress.ok & z.isfinite().all() & loss.isfinite()
    return Progress(torch.where(ok, progress.loss + loss, progress.loss), progress.steps + ok, ok)


def in_share(gradient: Tensor, share: float, ok: Tensor) -> Tensor:
    """Scale a client's gradient by its share of the merged batch."""
    return torch.where(ok, gradient * share, 0)


def or_zeros(server: Server, rows: PerClient[Tensor], like: PerClient[Tensor]) -> PerClient[Tensor]:
    """Return the rows, with zeros for clients of `like` that disconnected after their activations were merged."""
    if rows.ids == like.ids:
        return rows
    filled = server.each(torch.zeros_like, like)
    filled[rows] = rows
    return filled


def while_any(grads: Grads, num_ok: Tensor) -> Grads:
    """Replace the gradients by NaN if no client is left, so that momentum does not keep moving the server."""
    return grads._replace(params={k: torch.where(num_ok > 0, g, torch.nan) for k, g in grads.params.items()})


def own_mean(cut: Tensor, share: float, ok: Tensor) -> Tensor:
    """Undo the share; a stopped client gets NaN, so that it does not move."""
    return torch.where(ok, cut / share, torch.nan)
