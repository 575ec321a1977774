"""Cuts for given batch sizes (HASFL, section VI-B): found by descent, proven by the paper's mixed-integer programme.

With given batches, a deeper cut leaves the server less work, but may make others wait. So the cut of one device is easy
to choose, and changing one at a time nearly always finds the best cuts of all.
"""

import logging

import numpy as np

from cutlayer.errors import InfeasibleError
from cutlayer.planning.problem import GAP, Floats, Ints, Mask, Problem, of_others

log = logging.getLogger("cutlayer")

# With more devices the solver begins to hit its time limit, and the plan would depend on the machine.
MOST_PROVEN = 200
STARTS = 16  # equal cuts from which `best` descends; one alone loses up to a fifth if memory is scarce


def best(problem: Problem, batches: Ints, previous: Ints | None = None) -> Ints:
    """Return the best cuts for these batch sizes; if the solver gives up, the best that descent found."""
    cuts = quick(problem, batches, previous, starts=STARTS)
    if problem.num_devices > MOST_PROVEN:
        return cuts
    ratio = ratio_of(problem, batches, cuts)
    better = screen(problem, batches, ratio)
    if not better.any(axis=1).all():
        return cuts  # some device has no cut that a better plan could contain
    better[np.arange(len(cuts)), cuts - 1] = True
    from cutlayer.planning.cut_programme import dinkelbach  # scipy is slow to import

    found = dinkelbach(problem, batches, allowed=better, ratio=ratio)
    if found is None:
        log.warning("the solver found no cuts for %d devices in time; descent did", problem.num_devices)
        return cuts
    return found if ratio_of(problem, batches, found) < ratio else cuts


def descend(problem: Problem, batches: Ints, start: Ints) -> Ints:
    """Change the cut of the device where it helps most, until no change helps."""
    cuts = start.copy()
    value = ratio_of(problem, batches, cuts)
    while True:
        values = _neighbours(problem, batches, cuts)
        i, j = np.unravel_index(int(values.argmin()), values.shape)
        if not values[i, j] < value * (1 - GAP):
            return cuts
        value, cuts[i] = float(values[i, j]), j + 1


def _check(problem: Problem, batches: Ints) -> None:
    """Refuse batches that do not fit, or do not reach the target, even with one layer at each device."""
    for i in np.flatnonzero(batches > problem.table.capacity[:, 0]):
        raise InfeasibleError(
            "infeasible_memory",
            f"a batch of {batches[i]} does not fit device {i}, not even with one layer; lower it to "
            f"{int(problem.table.capacity[i, 0])} or give the device more memory or samples",
        )
    if problem.headroom(batches, np.ones_like(batches)) <= 0:
        raise InfeasibleError(
            "infeasible_eps",
            f"no cuts reach the target {problem.target:.3g} with these batch sizes; "
            "raise the batch sizes or the target",
        )


def quick(problem: Problem, batches: Ints, previous: Ints | None = None, *, starts: int = 1) -> Ints:
    """Descend from the best equal cuts, each as deep as the device's memory allows, and from the previous cuts."""
    _check(problem, batches)
    fitting = np.maximum((batches[:, None] <= problem.table.capacity).sum(axis=1), 1)  # memory grows with the cut
    equal = [np.minimum(cut, fitting) for cut in range(1, problem.num_layers + 1)]
    chosen = sorted(equal, key=lambda cuts: ratio_of(problem, batches, cuts))[:starts]
    if previous is not None and ratio_of(problem, batches, previous) < np.inf:
        chosen.append(previous)
    found = [descend(problem, batches, start) for start in chosen]
    return min(found, key=lambda cuts: ratio_of(problem, batches, cuts))


def ratio_of(problem: Problem, batches: Ints, cuts: Ints) -> float:
    """Return the seconds of a round over the headroom: the objective up to a constant factor."""
    room = problem.headroom(batches, cuts)
    if room <= 0 or not problem.fits(batches, cuts):
        return float("inf")
    return problem.seconds_per_round(batches, cuts) / room


def _neighbours(problem: Problem, batches: Ints, cuts: Ints) -> Floats:
    """Return the ratio after changing one device's cut, for every device and cut."""
    costs, fleet, tables = problem.costs, problem.fleet, problem.table
    here = tables.at(cuts)
    b, model = batches[:, None].astype(float), costs.model[cuts - 1]
    deepest = np.maximum(of_others(cuts)[:, None], np.arange(1, problem.num_layers + 1)).astype(int)
    own = model.sum() - model[:, None] + costs.model
    between = problem.num_devices * costs.model[deepest - 1] - own
    there = np.maximum(of_others(batches * here.there)[:, None], b * tables.there)
    back = np.maximum(of_others(batches * here.back)[:, None], b * tables.back)
    server = (batches * here.server).sum() - (batches * here.server)[:, None] + b * tables.server
    up = np.maximum(of_others(model / fleet.fed_up)[:, None], np.outer(1 / fleet.fed_up, costs.model))
    down = np.maximum(of_others(model / fleet.fed_down)[:, None], np.outer(1 / fleet.fed_down, costs.model))
    waits = np.maximum(up, between / fleet.server_up) + np.maximum(down, between / fleet.server_down)
    noise = problem.noise_rate * (1 / b).sum()
    room = problem.target - noise - problem.drift_rate * problem.slopes[deepest - 1]
    allowed = (room > 0) & (b <= tables.capacity)
    values: Floats = np.full(allowed.shape, np.inf)
    values[allowed] = ((there + back + server + waits / problem.interval) / np.where(room > 0, room, 1))[allowed]
    return values


def screen(problem: Problem, batches: Ints, ratio: float) -> Mask:
    """Return which cuts of which devices could be in a plan below this ratio, by a lower bound for each deepest cut.

    The deepest cut determines the headroom, and every other term is at least what it would be if each device had the
    cut that is best for that term alone.
    """
    allowed = batches[:, None] <= problem.table.capacity
    while True:
        kept = np.zeros_like(allowed)
        for deepest in range(1, problem.num_layers + 1):
            here = allowed & (np.arange(problem.num_layers) < deepest)
            if here[:, deepest - 1].any() and here.any(axis=1).all():
                kept |= here & (_least_ratios(problem, batches, here) < ratio * (1 - GAP))
        if (kept == allowed).all() or not kept.any(axis=1).all():
            return kept
        allowed = kept


def _least_ratios(problem: Problem, batches: Ints, allowed: Mask) -> Floats:
    """Return, for each device and cut, a lower bound on the ratio of all plans with it and the deepest allowed cut."""
    costs, fleet, tables = problem.costs, problem.fleet, problem.table
    b, deepest = batches[:, None].astype(float), int(np.flatnonzero(allowed.any(axis=0))[-1])
    room = problem.headroom(batches, np.array([deepest + 1]))
    if room <= 0:
        return np.full(allowed.shape, np.inf)

    def longest(times: Floats) -> Floats:
        alone: Floats = np.where(allowed, times, np.inf).min(axis=1)
        bounded: Floats = np.maximum(times, alone.max())
        return bounded

    server = b * tables.server
    least = np.where(allowed, server, np.inf).min(axis=1, keepdims=True)
    model = np.where(allowed, costs.model, 0).max(axis=1, keepdims=True)
    between = problem.num_devices * costs.model[deepest] - model.sum() + model - costs.model
    seconds = longest(b * tables.there) + longest(b * tables.back) + least.sum() - least + server
    for rate, servers in ((fleet.fed_up, fleet.server_up), (fleet.fed_down, fleet.server_down)):
        own = np.outer(1 / rate, costs.model)
        there = np.maximum(longest(own), own[allowed[:, deepest], deepest].min())  # some device has the deepest cut
        seconds = seconds + np.maximum(there, between / servers) / problem.interval
    bound: Floats = seconds / room
    return bound
