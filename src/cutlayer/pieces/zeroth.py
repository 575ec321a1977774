"""Training without back-propagation: central differences of the loss along random directions, on both sides of a cut.

Each side draws its own direction, and no seed is ever sent. The client's seed stays with the client: with it and the
scalar, which the server makes, anybody could compute the client's update.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.kinds import ACTIVATIONS, MODEL
from cutlayer.core.program import at_client
from cutlayer.core.state import Grads, Model, Part
from cutlayer.core.tree import storable
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split
from cutlayer.split.segment import Values


@storable
class Pair(NamedTuple):
    """What came of the parameters moved forth and back along a direction."""

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
    """The client's half: forward passes up, a scalar down, a step along its own direction."""

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
    def forward(self, part: Part, x: Tensor, key: int | None) -> Tensor:
        z: Tensor = self.model.lower(part, x, key)[0]
        return z

    @at_client(gives=ACTIVATIONS)
    def both_ways(self, part: Part, x: Tensor, key: int | None, seed: Tensor) -> Pair:
        moved = both_ways(part, seed, self.smoothing)
        return Pair(*(self.forward(there, x, key) for there in moved))

    @at_client(gives={"model": MODEL})
    def update(self, part: Part, slope: Tensor, seed: Tensor) -> Part:
        return self.opt.step(part, estimate(part, slope, seed))

    @at_client(gives={"model": MODEL})
    def update_by(self, part: Part, difference: Tensor, seed: Tensor) -> Part:
        """The same where the loss's difference comes down instead of its slope."""
        return self.update(part, difference / (2 * self.smoothing), seed)


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """A client's copy of the server-side layers."""

    model: Split
    opt: Transform
    smoothing: float

    def losses(self, part: Part, z: Pair, y: Tensor, key: int | None, seed: Tensor) -> Pair:
        """Both sides moved at once: the activations of either way meet the parameters of the same way."""
        moved = both_ways(part, seed, self.smoothing)
        return Pair(*(self._loss(there, at_cut, y, key) for there, at_cut in zip(moved, z, strict=True)))

    def slope(self, losses: Pair) -> Tensor:
        """In single precision, as it travels: both sides step by the same number."""
        return (losses.difference / (2 * self.smoothing)).float()

    def update(self, part: Part, slope: Tensor, seed: Tensor, losses: Pair) -> Part:
        return self.opt.step(part, estimate(part, slope, seed)._replace(loss=losses.mean))

    def difference(self, values: Values, z: Pair, y: Tensor, key: int | None) -> Tensor:
        """Of the losses where only the client has moved; in single precision, as it travels."""
        return Pair(*(self._loss(values, at_cut, y, key) for at_cut in z)).difference.float()

    def _loss(self, values: Values, z: Tensor, y: Tensor, key: int | None) -> Tensor:
        return self.model.loss(self.model.upper(values, z, key)[0], y)


def both_ways(part: Part, seed: Tensor, size: float) -> Iterator[Part]:
    """The part moved by `size` along the direction of a seed, then by as much against it; one of them at a time."""
    for signed in (size, -size):
        yield part._replace(params=directions.shifted(part.params, seed, signed))


def estimate(part: Part, slope: Tensor, seed: Tensor) -> Grads:
    """The gradient as far as one direction tells of it: the slope along it times the direction."""
    return Grads(directions.combined(part.params, seed[None], slope[None].double()), {})
