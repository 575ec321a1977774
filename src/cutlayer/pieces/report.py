"""The report of a round: losses, batches, and clients that stopped."""

from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer.core.state import Progress
from cutlayer.core.tree import storable


@storable
class Report(NamedTuple):
    """Sums over the clients of a round."""

    loss: Tensor  # sum of all batch losses
    batches: Tensor
    stopped: Tensor  # number of clients whose gradients were not finite

    def plus(self, other: "Report") -> "Report":
        return Report(*(a + b for a, b in zip(self, other, strict=True)))


def report(progress: Progress) -> Report:
    """Return one part's progress as numbers that can be summed."""
    return Report(progress.loss.double(), progress.steps.double(), (~progress.ok).double())


def plausible(own: Report) -> Report:
    """Return the report of one client without what no client can have done: fewer than no batches, more than one stop.

    Its loss may be anything, but it must not cancel the batches of others.
    """
    return Report(own.loss, own.batches.clamp(min=0), own.stopped.clamp(0, 1))


def report_of(loss: Tensor, ok: Tensor) -> Report:
    """Return the report of one client with one batch; `ok` says whether it counts."""
    return Report(torch.where(ok, loss, 0).double(), ok.double(), (~ok).double())


def nothing() -> Report:
    return Report(*(torch.zeros((), dtype=torch.float64) for _ in range(3)))
