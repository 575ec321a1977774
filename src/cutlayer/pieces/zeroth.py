"""Training without back-propagation: central differences of the loss along random directions, on both sides of a cut.

Each side draws its own direction, and no seed is ever sent. The client's seed stays with the client: anybody who has it
and the scalar, which the server computes, could compute the client's update.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.kinds import ACTIVATIONS, MODEL
from cutlayer.core.masks import Key
from cutlayer.core.program import at_client
from cutlayer.core.state import Grads, Model, Part
from cutlayer.core.tree import storable
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split
from cutlayer.split.segment import Values


@storable
class Pair(NamedTuple):
    """The results with the parameters moved forwards and backwards along a direction."""

    plus: Tensor
    minus: Tensor

    @property
    def difference(self) -> Tensor:
        return self.plus - self.minus

    @property
    def mean(self) -> Tensor:
        return (self.plus + self.minus) / 2


@dataclass(frozen=True, kw_only=True)
class ZerothClient:
    """The client's half: forward passes go up, a scalar comes down, and the client moves along its own direction."""

    model: Split
    opt: Transform
    smoothing: float

    @property
    def labels_leave(self) -> bool:
        return True

    @at_client(gives={"model": MODEL})
    def begin(self, model: Model, round: int) -> Part:
        return self.opt.begin(model, round)

    @at_client(gives=ACTIVATIONS)
    def forward(self, part: Part, x: Tensor, key: Key) -> Tensor:
        z: Tensor = self.model.lower(part, x, key)[0]
        return z

    @at_client(gives=ACTIVATIONS)
    def both_ways(self, part: Part, x: Tensor, key: Key, seed: Tensor) -> Pair:
        moved = both_ways(part, seed, self.smoothing)
        return Pair(*(self.forward(there, x, key) for there in moved))

    @at_client(gives={"model": MODEL})
    def update(self, part: Part, slope: Tensor, seed: Tensor) -> Part:
        return self.opt.step(part, estimate(part, slope, seed))

    @at_client(gives={"model": MODEL})
    def update_by(self, part: Part, difference: Tensor, seed: Tensor) -> Part:
        """Update from the difference of the losses instead of their slope."""
        return self.update(part, difference / (2 * self.smoothing), seed)


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """The functions of a client's copy of the server-side layers."""

    model: Split
    opt: Transform
    smoothing: float

    def losses(self, part: Part, z: Pair, y: Tensor, key: Key, seed: Tensor) -> Pair:
        """Return the losses with both sides moved at once, each in the same sense."""
        moved = both_ways(part, seed, self.smoothing)
        return Pair(*(self._loss(there, at_cut, y, key) for there, at_cut in zip(moved, z, strict=True)))

    def slope(self, losses: Pair) -> Tensor:
        """Return the slope in single precision, as it is sent, so that both sides use the same number."""
        return (losses.difference / (2 * self.smoothing)).float()

    def update(self, part: Part, slope: Tensor, seed: Tensor, losses: Pair) -> Part:
        return self.opt.step(part, estimate(part, slope, seed)._replace(loss=losses.mean))

    def difference(self, values: Values, z: Pair, y: Tensor, key: Key) -> Tensor:
        """Return the difference of the losses with only the client moved, in single precision, as it is sent."""
        return Pair(*(self._loss(values, at_cut, y, key) for at_cut in z)).difference.float()

    def _loss(self, values: Values, z: Tensor, y: Tensor, key: Key) -> Tensor:
        return self.model.loss(self.model.upper(values, z, key)[0], y)


def both_ways(part: Part, seed: Tensor, size: float) -> Iterator[Part]:
    """Yield the part moved by `size` along the direction of a seed, then against it; one at a time, to save memory."""
    for signed in (size, -size):
        yield part._replace(params=directions.shifted(part.params, seed, signed))


def estimate(part: Part, slope: Tensor, seed: Tensor) -> Grads:
    """Return the estimate of the gradient from one direction: the slope times the direction."""
    return Grads(directions.combined(part.params, seed[None], slope[None].double()), {})
