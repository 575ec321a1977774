"""The cuts as a mixed-integer programme (HASFL, problem P''), solved for a sequence of ratios by Dinkelbach's method.

The variables are mu, one for each device and cut, then T1 to T6: the drift and the model size of the deepest cut (in
Mbit, as with bits the coefficients would span nine orders of magnitude), the times of the slowest device there and
back, and the times of the aggregation up and down.
"""

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from cutlayer.planning.problem import GAP, Floats, Ints, Mask, Problem

MEGABIT = 1e6
TIME_LIMIT = 10.0  # seconds of one programme
MOST_RATIOS = 20  # 1 to 4 suffice
BELOW = 1 - 1e-6  # the drift stays below this part of what the noise leaves of the target
DRIFT, MODEL, THERE, BACK, UP, DOWN = range(6)  # T1 to T6


def dinkelbach(problem: Problem, batches: Ints, *, allowed: Mask | None = None, ratio: float = 0.0) -> Ints | None:
    """Return the best cuts; None if the solver finds no answer in time.

    `allowed`: the cuts to choose from, a row a device; all by default. `ratio`: the seconds of a round over the
    headroom of a known plan, from which the sequence starts.
    """
    open_cuts = batches[:, None] <= problem.table.capacity
    costs, bounds, constraints = _programme(problem, batches, open_cuts if allowed is None else open_cuts & allowed)
    whole = np.arange(len(costs)) < len(costs) - 6
    options = {"mip_rel_gap": GAP, "time_limit": TIME_LIMIT}
    for _ in range(MOST_RATIOS):
        costs[DRIFT - 6] = ratio * problem.drift_rate
        answer = milp(costs, integrality=whole, bounds=bounds, constraints=constraints, options=options)
        if answer.status != 0:
            return None
        cuts: Ints = answer.x[:-6].reshape(len(batches), -1).argmax(axis=1) + 1
        # An "optimal" answer may still violate a bound (scipy #22812), so check it as a plan.
        room = problem.headroom(batches, cuts)
        if room <= 0 or not problem.fits(batches, cuts):
            return None
        seconds = problem.seconds_per_round(batches, cuts)
        if problem.drift_rate == 0 or abs(seconds - ratio * room) <= GAP * max(1.0, seconds):
            return cuts
        ratio = seconds / room
    return None


def _programme(
    problem: Problem, batches: Ints, allowed: Mask
) -> tuple[Floats, Bounds, tuple[LinearConstraint, LinearConstraint]]:
    """Return costs, bounds and constraints: one cut for each device, and R1 to R8."""
    costs, fleet, tables = problem.costs, problem.fleet, problem.table
    n, layers = allowed.shape
    b, each, model = batches[:, None].astype(float), np.ones((n, 1)), costs.model / MEGABIT
    limits = [
        _limit(each * problem.slopes, DRIFT),
        _limit(each * model, MODEL),
        _limit(b * tables.there, THERE),
        _limit(b * tables.back, BACK),
        _limit(np.outer(MEGABIT / fleet.fed_up, model), UP),
        _between(n, model, MEGABIT / fleet.server_up, UP),
        _limit(np.outer(MEGABIT / fleet.fed_down, model), DOWN),
        _between(n, model, MEGABIT / fleet.server_down, DOWN),
    ]
    one_each = sparse.hstack([sparse.kron(sparse.eye(n), np.ones((1, layers))), sparse.csr_matrix((n, 6))])
    rows = LinearConstraint(one_each, 1, 1), LinearConstraint(sparse.vstack(limits), -np.inf, 0)
    most = np.append(allowed.ravel().astype(float), np.full(6, np.inf))
    if problem.drift_rate:
        room = problem.target - problem.noise_rate * float((1 / batches).sum())
        most[DRIFT - 6] = BELOW * room / problem.drift_rate
    share = 1 / problem.interval
    return np.append(b * tables.server, [0, 0, 1, 1, share, share]), Bounds(0, most), rows


def _limit(used: Floats, time: int) -> sparse.csr_matrix:
    """Return a row a device: what its cut uses is at most this one of T1 to T6."""
    n, layers = used.shape
    left = sparse.csr_matrix((used.ravel(), np.arange(n * layers), np.arange(n + 1) * layers), shape=(n, n * layers))
    right = sparse.csr_matrix((-np.ones(n), (np.arange(n), np.full(n, time))), shape=(n, 6))
    return sparse.hstack([left, right])


def _between(n: int, model: Floats, seconds_per_megabit: float, time: int) -> sparse.csr_matrix:
    """Return R6 or R8: the layers between each device's cut and the deepest one cross the servers in that time."""
    right = np.zeros(6)
    right[MODEL], right[time] = n * seconds_per_megabit, -1
    return sparse.csr_matrix(np.append(-seconds_per_megabit * np.tile(model, n), right))
