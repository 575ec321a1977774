"""Problems for the tests of the planner: by hand, of the paper's Table I, and at random."""

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np

from cutlayer.models import vgg16
from cutlayer.planning.devices import Uniform
from cutlayer.planning.problem import Bound, Costs, Fleet, Floats, Ints, Problem
from cutlayer.planning.profile import profile

LAYERS = 16


@cache
def vgg_costs() -> Costs:
    return Costs.of(profile(vgg16(), (3, 32, 32), optimiser_slots=0))


def table_one(seed: int, num_devices: int = 20) -> Problem:
    """VGG-16 on the devices of Table I; the noise is what twenty devices have, whatever their number."""
    noise = np.full(LAYERS, 10.0 * num_devices)
    return Problem(
        costs=vgg_costs(),
        fleet=Fleet.of(Uniform().draw(num_devices, 1.0, seed)),
        bound=Bound(beta=50.0, lr=5e-4, noise=noise, slope=np.full(LAYERS, 0.1), gap=2.3),
    )


def uneven(seed: int, num_devices: int = 20) -> Problem:
    """The same with devices that differ by 20 in computation and by 8 in the uplink."""
    rng = np.random.default_rng(seed)
    even = table_one(seed, num_devices)
    up = 80e6 / 8 ** rng.uniform(0, 1, num_devices)
    return replace(even, fleet=replace(even.fleet, flops=2e12 / 20 ** rng.uniform(0, 1, num_devices), up=up, fed_up=up))


def at_random(seed: int, num_devices: int = 3, layers: int = LAYERS) -> Problem:
    """Costs, devices and constants over orders of magnitude; half of them short of memory, some aggregate each step."""
    rng = np.random.default_rng(seed)
    forward, crossing = np.cumsum(rng.exponential(1e7, layers)), 10 ** rng.uniform(4, 6, layers)
    model = np.cumsum(10 ** rng.uniform(5, 7, layers))
    costs = Costs(forward=forward, backward=2 * forward, up=crossing, down=crossing, model=model, state=0 * model)
    up, down = 10 ** rng.uniform(6.5, 8, num_devices), 10 ** rng.uniform(7.5, 9, num_devices)
    short = 10 ** rng.uniform(7.5, 9, num_devices)
    fleet = Fleet(
        flops=10 ** rng.uniform(10, 12, num_devices),
        up=up,
        down=down,
        fed_up=up,
        fed_down=down,
        memory=short if rng.random() < 0.5 else np.full(num_devices, np.inf),
        server=10 ** rng.uniform(11, 13),
        server_up=10 ** rng.uniform(7, 9),
        server_down=10 ** rng.uniform(7, 9),
    )
    noise = num_devices * 10 ** rng.uniform(0, 2) * rng.uniform(0.1, 1, layers)
    slope = 10 ** rng.uniform(-2, 0) * rng.uniform(0.1, 1, layers)
    bound = Bound(beta=50.0, lr=5e-4, noise=noise, slope=slope, gap=2.3)
    return Problem(costs=costs, fleet=fleet, bound=bound, interval=int(rng.choice([1, 5, 15, 50])))


def two_devices() -> Problem:
    """A = 0.1, B = 0.1 and, with cuts 2 and 1, C = (1, 4); nothing to aggregate, so that D = T3 + T4."""
    ones, none = np.ones(2), np.zeros(3)
    forward = np.array([2.0, 5.0, 6.0])
    unlimited = np.full(2, np.inf)
    return Problem(
        costs=Costs(forward=forward, backward=none, up=none, down=np.ones(3), model=none, state=none),
        fleet=Fleet(
            flops=ones,
            up=ones,
            down=ones,
            fed_up=ones,
            fed_down=ones,
            memory=unlimited,
            server=1.0,
            server_up=1.0,
            server_down=1.0,
        ),
        bound=Bound(beta=1.0, lr=1.0, noise=np.array([0.4, 0.0, 0.0]), slope=none, gap=1.0, target=0.1),
        interval=1,
    )


def all_cuts(num_devices: int, layers: int) -> Ints:
    return np.array(list(product(range(1, layers + 1), repeat=num_devices)))


def ratios(problem: Problem, batches: Floats | Ints, cuts: Ints) -> Floats:
    """Seconds a round over headroom of many plans, a row each, straight from equations 28 to 39 and 45."""
    b, j = np.broadcast_arrays(np.asarray(batches, dtype=float), cuts - 1)
    costs, fleet = problem.costs, problem.fleet
    model, deepest = costs.model[j], costs.model[j.max(axis=1)]
    between = problem.num_devices * deepest - model.sum(axis=1)
    there = (b * (costs.forward[j] / fleet.flops + costs.up[j] / fleet.up)).max(axis=1)
    back = (b * (costs.down[j] / fleet.down + costs.backward[j] / fleet.flops)).max(axis=1)
    server = (b * costs.above[j]).sum(axis=1) / fleet.server
    up = np.maximum((model / fleet.fed_up).max(axis=1), between / fleet.server_up)
    down = np.maximum((model / fleet.fed_down).max(axis=1), between / fleet.server_down)
    seconds = there + back + server + (up + down) / problem.interval
    room = (
        problem.target - problem.noise_rate * (1 / b).sum(axis=1) - problem.drift_rate * problem.slopes[j.max(axis=1)]
    )
    fits = (b * costs.held[j] + costs.model[j] + costs.state[j] <= (1 - 1e-9) * fleet.memory).all(axis=1)
    if problem.samples is not None:
        fits &= (b <= problem.samples).all(axis=1)
    good = fits & (room > 0)
    return np.divide(seconds, room, out=np.full(len(seconds), np.inf), where=good)
