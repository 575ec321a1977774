"""FSL-SAGE's alignment: an auxiliary model learns to have the server's gradient at the cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cutlayer.core import tree
from cutlayer.core.state import Grads, Part
from cutlayer.optim.optimiser import Transform
from cutlayer.pieces.auxiliary import Auxiliary


@tree.storable
class Buffer(NamedTuple):
    """What one client has sent up, the newest last."""

    z: Tensor
    y: Tensor


def appended(limit: int, z: Tensor, y: Tensor, old: Buffer | None = None) -> Buffer:
    """The buffer with this batch; beyond the limit the oldest samples go."""
    z, y = (z, y) if old is None else (torch.cat([old.z, z]), torch.cat([old.y, y]))
    kept: Buffer = tree.owned(Buffer(z[-limit:], y[-limit:]))
    return kept


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Both gradients are of the mean loss over the buffer, which is one batch here."""

    auxiliary: Auxiliary
    opt: Transform

    def target(self, part: Part, buffer: Buffer, key: int) -> Tensor:
        """The true gradients at the cut, with the server's part as it is now."""
        model = self.auxiliary.model
        return at_cut(lambda z: model.loss(model.upper(part, z, key)[0], buffer.y), buffer.z)

    def distance(self, part: Part, buffer: Buffer, target: Tensor, key: int) -> Tensor:
        """Sum of squared differences between the auxiliary model's gradient at the cut and the true one."""
        found = at_cut(lambda z: self.auxiliary.loss(part, z, buffer.y, key), buffer.z)
        return (found - target).square().sum()

    def step(self, part: Part, buffer: Buffer, target: Tensor, key: int) -> Part:
        """The auxiliary model after one step down that distance, which differentiates twice."""
        params = {name: value.detach().requires_grad_() for name, value in part.params.items()}
        with torch.enable_grad():
            loss = self.distance(part._replace(params=params), buffer, target, key)
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        grads = {name: g for name, g in zip(params, found, strict=True) if g is not None}
        return self.opt.step(part, Grads(grads, {}, loss.detach()))


def at_cut(loss: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The loss's gradient at the activations; under enable_grad it can be differentiated again.

    A sample with a value that is not finite counts as zeros and has no gradient: it would spoil all later alignments.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        z = z.detach().requires_grad_()
        finite = z.isfinite().flatten(1).all(1).view(-1, *[1] * (z.dim() - 1))
        (gradient,) = torch.autograd.grad(loss(torch.where(finite, z, 0)), z, create_graph=again)
    return gradient
