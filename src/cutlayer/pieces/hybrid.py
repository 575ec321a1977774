"""HO-SFL's client, which never back-propagates: slopes along shared random directions, and a log to catch up from."""

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from cutlayer.core import directions, tree
from cutlayer.core.calculus import by_name
from cutlayer.core.kinds import ACTIVATIONS, SLOPES
from cutlayer.core.masks import Key
from cutlayer.core.program import at_client
from cutlayer.core.state import Grads, Model, Part, Tensors
from cutlayer.core.tree import storable
from cutlayer.errors import ConfigError
from cutlayer.optim.optimiser import Transform
from cutlayer.split import Split


@storable
class History(NamedTuple):
    """The client-side updates of consecutive rounds, as seeds and slopes."""

    seeds: Tensor  # (rounds, P): seeds of the directions
    slopes: Tensor  # (rounds, P): slopes along them, means over the clients; float64, as they are sent

    @classmethod
    def empty(cls, num: int) -> "History":
        return cls(torch.zeros(0, num, dtype=torch.int64), torch.zeros(0, num, dtype=torch.float64))

    def since(self, row: int) -> "History":
        return History(self.seeds[row:], self.slopes[row:])

    def at(self, row: int) -> "History":
        return History(self.seeds[row : row + 1], self.slopes[row : row + 1])

    def plus(self, seeds: Tensor, slopes: Tensor) -> "History":
        return History(
            torch.cat((self.seeds, seeds[None].to(self.seeds))), torch.cat((self.slopes, slopes[None].to(self.slopes)))
        )


@dataclass(frozen=True, kw_only=True)
class HybridClient:
    """The client's half of HO-SFL. A round is one optimiser step, so the step count is the version of the part."""

    model: Split
    opt: Transform
    smoothing: float
    overlap: int = 0  # perturbed passes in `ahead`
    side_by_side: int = 1  # most perturbed passes at once

    @property
    def labels_leave(self) -> bool:
        return True

    @at_client()
    def adopt(self, model: Model, moments: dict[str, Tensors], round: int) -> Part:
        """Return a downloaded part in the state in which a replay of all rounds would leave it."""
        return self.opt.begin(model, round)._replace(moments=moments, count=round)

    @at_client()
    def catch_up(self, part: Part, missed: History) -> Part:
        """Algorithm 3: replay the updates of missed rounds in order."""
        for seeds, slopes in zip(missed.seeds, missed.slopes, strict=True):
            part = self.update(part, seeds, slopes)
        return part

    @at_client(gives=ACTIVATIONS)
    def forward(self, part: Part, x: Tensor, key: Key) -> Tensor:
        """Equation (9)."""
        z: Tensor = self.model.lower(part, x, key)[0]
        return z

    @at_client()
    def ahead(self, part: Part, x: Tensor, key: Key, seeds: Tensor) -> tuple[Tensor, ...]:
        """Run the first passes of (16) while the gradient is on its way; each holds one more cut tensor in memory."""
        groups = self._groups(seeds[: self.overlap])
        return tuple(moved for group in groups for moved in self._passes(part, x, key, group))

    @at_client(gives=SLOPES)
    def slopes(
        self,
        part: Part,
        x: Tensor,
        key: Key,
        seeds: Tensor,
        z: Tensor,
        gradient: Tensor,
        ahead: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """(17): return the change of the loss along each direction, to first order in the activations."""
        found = [_projected(gradient, moved, z) for moved in ahead]
        for group in self._groups(seeds[len(ahead) :]):
            found += self._slopes_of(part, x, key, group, z, gradient)
        return torch.stack(found)

    @at_client()
    def update(self, part: Part, seeds: Tensor, slopes: Tensor) -> Part:
        """(19) and (20): update the part, and set the learning rate of the next round."""
        gradient = directions.combined(part.params, seeds, slopes / (len(seeds) * self.smoothing))
        moved = self.opt.step(part, Grads(gradient, {}))
        return self.opt.resume(moved, moved.count)

    def _groups(self, seeds: Tensor) -> list[Tensor]:
        """Split the seeds into groups of passes that run at once."""
        return [seeds[start : start + self.side_by_side] for start in range(0, len(seeds), self.side_by_side)]

    def _slopes_of(self, part: Part, x: Tensor, key: Key, group: Tensor, z: Tensor, gradient: Tensor) -> list[Tensor]:
        """Return the slopes of a group; in a function, so that its passes' outputs are freed before the next group."""
        return [_projected(gradient, moved, z) for moved in self._passes(part, x, key, group)]

    def _passes(self, part: Part, x: Tensor, key: Key, group: Tensor) -> tuple[Tensor, ...]:
        """(16) along each direction of a group. Each pass has its own buffers, because layers may write into them."""
        if len(group) == 1:
            return (self._perturbed(part, x, key, group[0]),)
        refuse_draws(self.model)

        def one(seed: Tensor, buffers: Tensors) -> Tensor:
            return self._perturbed(part._replace(buffers=buffers), x, key, seed)

        buffers = {name: b.expand(len(group), *b.shape) for name, b in part.buffers.items()}
        moved = vmap(one)(group, buffers)
        return tuple(tree.map(itemgetter(k), moved) for k in range(len(group)))

    def _perturbed(self, part: Part, x: Tensor, key: Key, seed: Tensor) -> Tensor:
        """Return f(x; θ + μu). The part is not changed: adding and subtracting μu would leave rounding errors."""
        moved = part._replace(params=directions.shifted(part.params, seed, self.smoothing))
        return self.forward(moved, x, key)


def refuse_draws(model: Split) -> None:
    """Refuse passes side by side for a random model; a rehearsal may find out only after the method was made."""
    if model.random:
        raise ConfigError(
            f"HO-SFL cannot make passes side by side with this model: in training, {model.random} draws from torch's "
            "random generator, which vmap cannot stack; leave side_by_side at 1"
        )


def _projected(gradient: Tensor, moved: Tensor, z: Tensor) -> Tensor:
    """Multiply in the tensors' own type, and sum in float64."""
    there, here = by_name(moved), by_name(z)
    found = [((there[k] - here[k]) * g).sum(dtype=torch.float64) for k, g in by_name(gradient).items()]
    return torch.stack(found).sum()
