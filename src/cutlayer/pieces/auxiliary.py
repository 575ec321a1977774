"""FSL-SAGE's auxiliary models, with which a client has a gradient at the cut without the server, and their alignment.

The server trains an auxiliary model until its gradient at the cut is close to the server's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cutlayer.core import tree
from cutlayer.core.checks import check, check_type, reason
from cutlayer.core.masks import Key
from cutlayer.core.program import at_client
from cutlayer.core.state import Grads, Model, Part, Tensors
from cutlayer.errors import ConfigError
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split
from cutlayer.split.segment import Values

WEIGHT, BIAS = "auxiliary.weight", "auxiliary.bias"  # of the linear layer on top
HOW_TO_GIVE = "give an auxiliary model of your own, in Python: fsl_sage(..., auxiliary=module)"


class Net(Protocol):
    """A network from the cut to the scores of the classes, as a pure function of named values."""

    def start(self, z: Tensor, key: int) -> Model:
        """Return the initial values, for activations like these."""

    def scores(self, values: Values, z: Tensor, key: Key) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class FirstUnits:
    """The server's first units with their initial values, pooling, and a new linear layer to the classes."""

    model: Split
    units: int

    @classmethod
    def of(cls, model: Split, units: int | None) -> "FirstUnits":
        """Copy this many units; by default one, if the server has another above it."""
        most = max(0, model.num_units - model.cut - 1)
        chosen = min(1, most) if units is None else units
        wanted = f"a whole number from 0 to {most}, the server's units but its last"
        check(type(chosen) is int and 0 <= chosen <= most, "auxiliary_units", chosen, wanted)
        return cls(model=model, units=chosen)

    @property
    def copied(self) -> Split:
        """A split whose server has only the copied units."""
        return self.model.at(self.model.cut, self.model.cut + self.units)

    def start(self, z: Tensor, key: int) -> Model:
        _, server = self.model.initial()
        outputs = self.model.upper(server, z, key)[0]
        if outputs.dim() != 2:
            raise ConfigError(
                f"the auxiliary model ends in a row of scores for each sample, but this model's outputs have the shape "
                f"{tuple(outputs.shape)}; {HOW_TO_GIVE}"
            )
        _, units = self.copied.initial()
        width = pooled(self.copied.upper(units, z, key)[0]).shape[1]
        return units._replace(params={**units.params, **_linear(width, outputs, key)})

    def scores(self, values: Values, z: Tensor, key: Key) -> Tensor:
        h, _ = self.copied.upper(values, z, key)
        return F.linear(pooled(h), values.params[WEIGHT], values.params[BIAS])


@dataclass(frozen=True, kw_only=True)
class Given:
    """A module of the user; every client begins with its values."""

    model: Split
    split: Split  # the module, all of it above the cut

    @classmethod
    def of(cls, model: Split, module: nn.Module) -> "Given":
        check_type("auxiliary", module, nn.Module, "from the activations at the cut to scores of the classes")
        return cls(model=model, split=Split(module, 0))

    def start(self, z: Tensor, key: int) -> Model:
        begun, (_, server) = self.split.initial()[1], self.model.initial()
        outputs = self.model.upper(server, z, key)[0]
        try:
            scores = self.scores(begun, z, key)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(
                f"the auxiliary model does not fit the activations at the cut, which have the shape {tuple(z.shape)}: "
                f"{reason(error).rstrip('.')}; give a module from those to scores of the classes"
            ) from error
        if scores.shape != outputs.shape:
            raise ConfigError(
                f"the auxiliary model gives scores of shape {tuple(scores.shape)} for activations of shape "
                f"{tuple(z.shape)} at the cut, but the model's outputs have the shape {tuple(outputs.shape)}; "
                "give a score for each class"
            )
        return begun

    def scores(self, values: Values, z: Tensor, key: Key) -> Tensor:
        out: Tensor = self.split.upper(values, z, key)[0]
        return out


@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """A network with the model's loss. Nobody evaluates it, so its running statistics are not updated."""

    model: Split
    net: Net

    def loss(self, values: Values, z: Tensor, y: Tensor, key: Key) -> Tensor:
        return self.model.loss(self.net.scores(values, z, key), y)

    @at_client()
    def local_loss(self, z: Tensor, values: Model, y: Tensor, key: Key) -> tuple[Tensor, Tensors]:
        """Return the loss whose gradient at the cut replaces the server's."""
        return self.loss(values, z, y, key), {}


def pooled(h: Tensor) -> Tensor:
    """Return one vector per sample: the mean over an image, the last position of a text."""
    if h.dim() not in (2, 3, 4):
        raise ConfigError(
            f"the auxiliary model cannot pool activations of shape {tuple(h.shape)}: it knows (batch, width), "
            f"(batch, places, width) and (batch, channels, height, width); {HOW_TO_GIVE}"
        )
    return h.mean((2, 3)) if h.dim() == 4 else h[:, -1] if h.dim() == 3 else h


def _linear(width: int, outputs: Tensor, key: int) -> Tensors:
    """Return values as in a new nn.Linear, but drawn from the key."""
    random, bound = torch.Generator().manual_seed(key), width**-0.5
    shapes = {WEIGHT: (outputs.shape[1], width), BIAS: (outputs.shape[1],)}
    return {name: torch.empty(s).uniform_(-bound, bound, generator=random).to(outputs) for name, s in shapes.items()}


@tree.storable
class Buffer(NamedTuple):
    """The activations and labels that one client has sent, the newest last."""

    z: Tensor
    y: Tensor


def appended(limit: int, z: Tensor, y: Tensor, old: Buffer | None = None) -> Buffer:
    """Append this batch to the buffer; beyond the limit, drop the oldest samples."""
    if isinstance(z, dict):
        raise ConfigError(
            f"FSL-SAGE's auxiliary model reads one tensor at the cut, but here {', '.join(z)} cross; cut the model "
            "where one tensor crosses"
        )
    z, y = (z, y) if old is None else (torch.cat([old.z, z]), torch.cat([old.y, y]))
    kept: Buffer = tree.owned(Buffer(z[-limit:], y[-limit:]))
    return kept


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Trains an auxiliary model. Both gradients are of the mean loss over the buffer, which is one batch."""

    auxiliary: Auxiliary
    opt: Transform

    def target(self, part: Part, buffer: Buffer, key: int) -> Tensor:
        """Return the true gradients at the cut, with the server's current part."""
        model = self.auxiliary.model
        return at_cut(lambda z: model.loss(model.upper(part, z, key)[0], buffer.y), buffer.z)

    def distance(self, part: Part, buffer: Buffer, target: Tensor, key: int) -> Tensor:
        """Return the sum of squared differences between the auxiliary model's gradient at the cut and the true one."""
        found = at_cut(lambda z: self.auxiliary.loss(part, z, buffer.y, key), buffer.z)
        return (found - target).square().sum()

    def step(self, part: Part, buffer: Buffer, target: Tensor, key: int) -> Part:
        """Return the auxiliary model after one step that reduces the distance; this differentiates twice."""
        params = {name: value.detach().requires_grad_() for name, value in part.params.items()}
        with torch.enable_grad():
            loss = self.distance(part._replace(params=params), buffer, target, key)
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        grads = {name: g for name, g in zip(params, found, strict=True) if g is not None}
        return self.opt.step(part, Grads(grads, {}, loss.detach()))


def at_cut(loss: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """Return the gradient of the loss at the activations; under enable_grad it can be differentiated again.

    A sample with a value that is not finite counts as zeros and has no gradient; it would spoil all later alignments.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        z = z.detach().requires_grad_()
        finite = z.isfinite().flatten(1).all(1).view(-1, *[1] * (z.dim() - 1))
        (gradient,) = torch.autograd.grad(loss(torch.where(finite, z, 0)), z, create_graph=again)
    return gradient
