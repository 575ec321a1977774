"""What zeroth-order methods compute, by hand: a loss that is quadratic in all weights, its gradient, the directions."""

import torch
from conftest import round_key
from one_weight import mean_output
from torch import Tensor, nn
from torch.func import grad

from cutlayer.core import directions, keys
from cutlayer.core.state import Model, Tensors
from cutlayer.data.arrays import Arrays
from cutlayer.split import Split

SAMPLES = 40


def quadratic(hidden: int = 2) -> Split:
    """Two linear layers under a linear loss: quadratic in the weights of both together, so differences are exact."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 1)).double()
    return Split(net, 1, loss=mean_output)


def samples(num: int = SAMPLES) -> Arrays:
    random = torch.Generator().manual_seed(5)
    return Arrays(x=torch.randn(num, 3, generator=random, dtype=torch.float64), y=torch.zeros(num, dtype=torch.float64))


def loss(split: Split, lower: Model, upper: Model, batch: Arrays) -> Tensor:
    return split.loss(split.whole(lower.joined(upper), batch.x)[0], batch.y)


def gradient(split: Split, lower: Model, upper: Model, batch: Arrays) -> tuple[Tensors, Tensors]:
    """Return the gradients of the batch's mean loss at the client and at the server, by back-propagation."""

    def of_params(below: Tensors, above: Tensors) -> Tensor:
        return loss(split, lower._replace(params=below), upper._replace(params=above), batch)

    below, above = grad(of_params, argnums=(0, 1))(lower.params, upper.params)
    return below, above


def client_direction(like: Model, number: int, client: int, step: int = 0) -> Tensors:
    return _direction(like, torch.tensor(keys.fold(round_key(number), "own", step, client)))


def server_direction(like: Model, number: int, client: int, step: int = 0, update: int | None = None) -> Tensors:
    """Return the server's direction of a step, or of one of its several updates."""
    seed = torch.tensor(keys.fold(round_key(number), "step", step, client))
    return _direction(like, seed if update is None else directions.child(seed, update))


def _direction(like: Model, seed: Tensor) -> Tensors:
    return directions.combined(like.params, seed[None], torch.ones(1, dtype=torch.float64))


def dot(a: Tensors, b: Tensors) -> Tensor:
    return sum((torch.sum(a[k] * b[k]) for k in a), torch.zeros((), dtype=torch.float64))


def stepped(model: Model, direction: Tensors, factor: Tensor | float) -> Model:
    return model._replace(params={k: p + factor * direction[k] for k, p in model.params.items()})


def flat(values: Tensors) -> Tensor:
    return torch.cat([v.flatten() for v in values.values()])


def difference(a: Model, b: Model) -> Tensor:
    return flat(a.params) - flat(b.params)


def correlation(a: Tensor, b: Tensor) -> float:
    return abs(float(torch.corrcoef(torch.stack((a, b)))[0, 1]))


def digits_net() -> nn.Module:
    """A network of 460 weights for the digits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Linear(6, 10))
