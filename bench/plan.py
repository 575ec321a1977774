"""How long a plan for many devices takes, with the cuts proven and by descent alone, and what descent loses.

VGG-16 of 16 layers on devices that differ by 20 in computation and by 8 in the uplink, with memory for everything or
for a few layers only.
"""

from dataclasses import replace
from statistics import median
from time import perf_counter

import numpy as np
from tables import Row, options, show

from cutlayer import models
from cutlayer.planning import cut_layers
from cutlayer.planning.devices import Uniform
from cutlayer.planning.planner import solve
from cutlayer.planning.problem import Bound, Costs, Fleet, Problem
from cutlayer.planning.profile import profile

BAR, BARRED = 2.0, 20  # seconds, for so many devices
DEVICES = (20, 100, 300, 1000)
MOST_PROVEN = 300  # devices; with more the solver may run out of time, and nothing is proven
TURNS = 3


def main() -> None:
    args = options(__doc__.splitlines()[0])
    numbers = (3, 4) if args.quick else DEVICES
    costs = Costs.of(profile(models.vgg16(), (3, 32, 32), optimiser_slots=0))
    turns = 1 if args.quick else TURNS
    show([measure(costs, number, short, turns) for short in (False, True) for number in numbers], args.json)


def measure(costs: Costs, number: int, short: bool, turns: int) -> Row:
    """The medians over different devices, and the largest gap."""
    problems = [draw(costs, number, short, seed) for seed in range(turns)]
    fast = [timed(problem, proven=False) for problem in problems]
    proven = [timed(problem, proven=True) for problem in problems] if number <= MOST_PROVEN else []
    gaps = [f / p - 1 for (_, f), (_, p) in zip(fast, proven, strict=False)]
    seconds = median(t for t, _ in proven or fast)
    return {
        "memory": "short" if short else "enough",
        "devices": number,
        "layers": problems[0].num_layers,
        "proven, s": seconds if proven else None,
        "descent, s": median(t for t, _ in fast),
        "gap of descent, %": 100 * max(gaps) if proven else None,
        "bar, s": BAR if number == BARRED else None,
        "met": seconds <= BAR if number == BARRED else None,
    }


def draw(costs: Costs, number: int, short: bool, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    fleet = Fleet.of(Uniform().draw(number, 1.0, seed))
    up = 80e6 / 8 ** rng.uniform(0, 1, number)
    fleet = replace(fleet, flops=2e12 / 20 ** rng.uniform(0, 1, number), up=up, fed_up=up)
    if short:
        fleet = replace(fleet, memory=10 ** rng.uniform(7.5, 9, number))  # bits; 16 samples with one layer take 7e7
    layers = len(costs.forward)
    # Noise that grows with the devices, so that their number does not by itself make every batch small.
    noise = np.full(layers, 10.0 * number)
    bound = Bound(beta=50.0, lr=5e-4, noise=noise, slope=np.full(layers, 0.1), gap=2.3)
    return Problem(costs=costs, fleet=fleet, bound=bound)


def timed(problem: Problem, proven: bool) -> tuple[float, float]:
    """Seconds that planning takes, and seconds until the target of the plan."""
    cut_layers.MOST_PROVEN = problem.num_devices if proven else 0
    began = perf_counter()
    planned = solve(problem)
    return perf_counter() - began, planned.seconds


if __name__ == "__main__":
    main()
