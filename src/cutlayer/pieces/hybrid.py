"""A client that never back-propagates: slopes along shared random directions, and a log from which it catches up."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer import directions
from cutlayer.kinds import ACTIVATIONS, SLOPES
from cutlayer.optim import Transform
from cutlayer.program import at_client
from cutlayer.split import Split
from cutlayer.state import Grads, Model, Part, Tensors


class History(NamedTuple):
    """The client-side updates of consecutive rounds, as what they are made of."""

    seeds: Tensor  # (rounds, P): of the directions
    slopes: Tensor  # (rounds, P): along them, means over the clients; float64, as they are broadcast

    @classmethod
    def empty(cls, num: int) -> "History":
        return cls(torch.zeros(0, num, dtype=torch.int64), torch.zeros(0, num, dtype=torch.float64))

    def since(self, row: int) -> "History":
        return History(self.seeds[row:], self.slopes[row:])

    def until(self, row: int) -> "History":
        return History(self.seeds[:row], self.slopes[:row])

    def plus(self, seeds: Tensor, slopes: Tensor) -> "History":
        return History(
            torch.cat((self.seeds, seeds[None].to(self.seeds))), torch.cat((self.slopes, slopes[None].to(self.slopes)))
        )


@dataclass(frozen=True, kw_only=True)
class HybridClient:
    """The client's half of HO-SFL; a round is one step of the optimiser, so its count is the version of the part."""

    model: Split
    opt: Transform
    smoothing: float
    overlap: int = 0  # passes that `ahead` makes

    @property
    def labels_leave(self) -> bool:
        return True

    @at_client()
    def adopt(self, model: Model, moments: dict[str, Tensors], round: int) -> Part:
        """A part that was downloaded whole, as if every round had been replayed."""
        return self.opt.begin(model, round)._replace(moments=moments, count=round)

    @at_client()
    def catch_up(self, part: Part, missed: History) -> Part:
        """Algorithm 3: the updates of missed rounds, in their order."""
        for seeds, slopes in zip(missed.seeds, missed.slopes, strict=True):
            part = self.update(part, seeds, slopes)
        return part

    @at_client(gives=ACTIVATIONS)
    def forward(self, part: Part, x: Tensor, key: int | None) -> Tensor:
        """(9)"""
        z: Tensor = self.model.lower(part, x, key)[0]
        return z

    @at_client()
    def ahead(self, part: Part, x: Tensor, key: int | None, seeds: Tensor) -> tuple[Tensor, ...]:
        """The first passes of (16), while the gradient is under way: each is one more cut tensor to hold."""
        return tuple(self._perturbed(part, x, key, seed) for seed in seeds[: self.overlap])

    @at_client(gives=SLOPES)
    def slopes(
        self,
        part: Part,
        x: Tensor,
        key: int | None,
        seeds: Tensor,
        z: Tensor,
        gradient: Tensor,
        ahead: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """(17): how much the loss would change along each direction, to first order in the activations."""
        found = [_projected(gradient, moved, z) for moved in ahead]
        found += [_projected(gradient, self._perturbed(part, x, key, s), z) for s in seeds[len(ahead) :]]
        return torch.stack(found)

    @at_client()
    def update(self, part: Part, seeds: Tensor, slopes: Tensor) -> Part:
        """(19) and (20); the part comes out ready for the next round, with its learning rate."""
        gradient = directions.combined(part.params, seeds, slopes / (len(seeds) * self.smoothing))
        moved = self.opt.step(part, Grads(gradient, {}))
        return self.opt.resume(moved, moved.count)

    def _perturbed(self, part: Part, x: Tensor, key: int | None, seed: Tensor) -> Tensor:
        """f(x; θ + μu). The part stays as it is: adding μu and taking it off again would leave rounding behind."""
        moved = part._replace(params=directions.shifted(part.params, seed, self.smoothing))
        return self.forward(moved, x, key)


def _projected(gradient: Tensor, moved: Tensor, z: Tensor) -> Tensor:
    """The product is taken in the tensors' own type and summed in float64."""
    return ((moved - z) * gradient).sum(dtype=torch.float64)
