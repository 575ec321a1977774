"""Small worlds for the tests of HO-SFL: smooth models, clients that take turns as told, and what they keep."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import clients_of, images, round_key, run, simulation
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import directions, keys, tree
from cutlayer.core.memory import Kept
from cutlayer.core.state import Part, State
from cutlayer.methods.hosfl import PART, HybridOrder
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

ENGINES = ("loop", "vmap")
PLAIN = optim.sgd(0.1)
EQUAL = (8,) * 5  # samples of each client; in batches of 4
P = 3


def smooth(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two units: 64 -> 3 -> 10, of which the lower one has 195 parameters and 3 numbers cross the cut."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        lower = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh())
        return nn.Sequential(lower, nn.Linear(3, 10)).to(dtype)


WIDTH, NUM_LOWER = 3, 195


def hosfl(net: nn.Module | None = None, opt: optim.Transform = PLAIN, **options: Any) -> HybridOrder:
    """HO-SFL on a model that is cut after its first unit."""
    given = {"perturbations": P, "client_opt": opt, "server_opt": opt, **options}
    return methods.hosfl(model=Split(net or smooth(), 1), **given)


def world(method: HybridOrder, sizes: Sequence[int] = EQUAL, **options: Any) -> Simulation:
    dtype = next(method.model.model.parameters()).dtype
    return simulation(method, options.pop("data", None) or images(sum(sizes), dtype), clients_of(sizes), **options)


def take_turns(monkeypatch: pytest.MonkeyPatch, *turns: tuple[int, ...]) -> None:
    """These clients take part, round after round."""
    by_key = {round_key(number): ids for number, ids in enumerate(turns)}

    def sampled(self: Rounds, number: int, key: int) -> dict[int, int]:
        present = self.backend.present(number)
        return {j: present[j] for j in by_key[key]}

    monkeypatch.setattr(Rounds, "_sampled", sampled)


def states(sim: Simulation, rounds: int) -> list[State]:
    """The state before the first round, and after each."""
    found = [sim.start()]
    for _ in range(rounds):
        found.append(sim.round(found[-1]))
    return found


def kept(sim: Simulation, j: int) -> Kept:
    """What a client keeps."""
    return sim.backend.memory.of(PART)[j]


def same(a: Part, b: Part) -> bool:
    """Whether values, moments and count of two parts are equal, bit for bit."""
    ours, theirs = (tree.tensors((p.model, p.moments)) for p in (a, b))
    return a.count == b.count and all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def flat(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([v.flatten() for v in values.values()])


def seeds_of(number: int, num: int = P) -> Tensor:
    """The seeds of a round."""
    return directions.seeds(keys.fold(round_key(number), "directions"), num)


def moved(sim: Simulation, rounds: int = 1) -> tuple[Tensor, Tensor]:
    """How far both halves have gone since the start."""
    start, end = sim.start(), run(sim, rounds)
    pairs = ((start.client, end.client), (start.server, end.server))
    lower, upper = (flat(old.tree.params) - flat(new.tree.params) for old, new in pairs)
    return lower, upper
