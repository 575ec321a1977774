"""What one sample costs each device at each cut, as tables for the planner: a row a device, a column a cut."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlayer.planning.problem import Floats, Ints, Problem

GAP = 1e-9  # relative: a smaller gain is none
Mask = NDArray[np.bool_]


class CostTable(NamedTuple):
    """Seconds a sample, and the largest batch."""

    there: Floats  # forward and uplink: what R3 bounds
    back: Floats  # downlink and backward: R4
    server: Floats  # C of (47), of a sample cut there, whoever sent it; a row for all
    capacity: Floats  # by memory and samples, not rounded

    def at(self, cuts: Ints) -> "CostTable":
        """A vector of each, for one cut a device."""
        i, j = np.arange(len(cuts)), cuts - 1
        return CostTable(self.there[i, j], self.back[i, j], self.server[j], self.capacity[i, j])


@lru_cache(maxsize=4)  # every step of a plan asks for it
def table(problem: Problem) -> CostTable:
    costs, fleet = problem.costs, problem.fleet
    room = [problem.capacity(np.full(problem.num_devices, cut)) for cut in range(1, problem.num_layers + 1)]
    return CostTable(
        there=np.outer(1 / fleet.flops, costs.forward) + np.outer(1 / fleet.up, costs.up),
        back=np.outer(1 / fleet.down, costs.down) + np.outer(1 / fleet.flops, costs.backward),
        server=costs.above / fleet.server,
        capacity=np.stack(room, axis=1),
    )


def of_others(values: Floats | Ints) -> Floats:
    """For each entry the largest of all the others; 0 for a single one."""
    others = np.full(len(values), values.max(), dtype=float)
    k = int(values.argmax())
    others[k] = np.delete(values, k).max(initial=0)
    return others
