"""What a round tells of itself: losses, batches, and clients that had to stop."""

from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer.core.state import Progress
from cutlayer.core.tree import storable


@storable
class Report(NamedTuple):
    """Sums over the clients of a round."""

    loss: Tensor  # of all batch losses
    batches: Tensor
    stopped: Tensor  # clients whose gradients were not finite

    def plus(self, other: "Report") -> "Report":
        return Report(*(a + b for a, b in zip(self, other, strict=True)))


def report(progress: Progress) -> Report:
    """One part's progress as numbers that can be added up."""
    return Report(progress.loss.double(), progress.steps.double(), (~progress.ok).double())


def report_of(loss: Tensor, ok: Tensor) -> Report:
    """One client's single batch; `ok` tells whether it counted."""
    return Report(torch.where(ok, loss, 0).double(), ok.double(), (~ok).double())


def nothing() -> Report:
    return Report(*(torch.zeros((), dtype=torch.float64) for _ in range(3)))
