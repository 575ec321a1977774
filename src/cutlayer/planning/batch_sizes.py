"""Batch sizes for given cuts (HASFL, Proposition 1): the paper's step, and one that also chooses its time limits.

With the cuts fixed, the seconds until the target are (2 gap / lr) * (sum of C_i b_i + D) / (A - sum of B / b_i). The
paper keeps D fixed, and with it the time limits of the slowest device there (T3, forward and uplink) and back (T4,
downlink and backward), at the times of the last batch sizes. `joint` chooses T3 and T4 as well.
"""

from typing import NamedTuple

import numpy as np

from cutlayer.errors import InfeasibleError
from cutlayer.planning.problem import CostTable, Floats, Ints, Problem, of_others

Times = tuple[float, float]  # T3, T4

CLOSE = 1e-10  # relative change at which Newton's steps end
MOST_STEPS = 200  # 8 to 15 suffice from a sensible start; each halving or doubling adds one
GRID = 33  # values of T3 that are tried at a time
ZOOMS = 4  # each narrows the range of T3 to a sixteenth, in total to 1e-5: far below one sample
CANDIDATES = 48  # values of T3, and of T4, that are tried around the best
MOST_RATIOS = 30  # of Dinkelbach's method, which converges superlinearly, in 3 to 6


class _Terms(NamedTuple):
    """The constants of the sub-problem, with the paper's letters."""

    a: float  # the target less the drift of the deepest cut
    b: float  # noise rate: the bound grows by b / batch
    c: Floats  # server seconds a sample, by device
    d: float  # seconds of a round that do not depend on batch sizes: its share of the aggregation
    least: Floats  # smallest batch, by device


def _terms(problem: Problem, cuts: Ints) -> _Terms:
    drift = problem.drift_rate * problem.slopes[int(cuts.max()) - 1]
    shared = problem.latency(np.ones(len(cuts)), cuts).aggregation / problem.interval
    server = problem.table.server[cuts - 1]
    return _Terms(problem.target - float(drift), problem.noise_rate, server, shared, problem.smallest)


def times_of(problem: Problem, cuts: Ints, batches: Ints | Floats) -> Times:
    """Return T3 and T4: how long the slowest device takes there, and back."""
    latency = problem.latency(batches, cuts)
    return float((latency.forward + latency.up).max()), float((latency.down + latency.backward).max())


def largest(problem: Problem, cuts: Ints, times: Times) -> Floats:
    """Return kappa: the largest batch, not rounded, that fits the memory, the samples and both times."""
    here = problem.table.at(cuts)
    return np.minimum(here.capacity, np.minimum(times[0] / here.there, times[1] / here.back))


def newton_jacobi(problem: Problem, cuts: Ints, times: Times, start: Ints | Floats) -> Floats:
    """Solve (50) and (51) by Newton's steps on all batch sizes at once: the point where no change pays."""
    terms = _without_free(problem, cuts, times)
    busy = terms.c > 0
    batches = largest(problem, cuts, times)
    b, c = np.asarray(start, dtype=float)[busy], terms.c[busy]
    for _ in range(MOST_STEPS):
        seconds = (b * c).sum() + terms.d
        slope = c * (terms.a - (terms.b / b).sum()) - seconds * terms.b / b**2  # Xi; the paper omits the square
        step = b - slope * b**3 / (2 * seconds * terms.b)
        new = np.where(step <= 0, b / 2, np.minimum(step, 2 * b))
        moved = np.abs(new - b).max(initial=0.0)
        b = new
        if moved < CLOSE * max(1.0, b.max(initial=0.0)):
            break
    batches[busy] = b
    return batches


def _without_free(problem: Problem, cuts: Ints, times: Times) -> _Terms:
    """Return the terms for given times; devices that leave the server no work take their largest batch, a constant."""
    terms = _terms(problem, cuts)
    kappa = largest(problem, cuts, times)
    a = terms.a - float((terms.b / kappa[terms.c == 0]).sum())
    if a <= 0:
        raise InfeasibleError("infeasible_eps", UNREACHABLE.format(target=problem.target))
    return terms._replace(a=a, d=terms.d + sum(times))


UNREACHABLE = (
    "no batch sizes reach the target {target:.3g} with these cuts; raise the target, lower the learning rate or the "
    "interval, or give the devices more memory or samples"
)


def rounded(problem: Problem, cuts: Ints, continuous: Floats, largest: Floats) -> Ints:
    """Round as in (52): to the better neighbour of each, up to its largest, while all others stay as they are."""
    most = np.maximum(np.floor(largest), problem.smallest)
    b = np.clip(continuous, problem.smallest, most)
    here, terms = problem.table.at(cuts), _terms(problem, cuts)
    there, back = of_others(b * here.there), of_others(b * here.back)

    def ratio(new: Floats) -> Floats:
        waits = np.maximum(there, new * here.there) + np.maximum(back, new * here.back)
        room = terms.a - terms.b * ((1 / b).sum() - 1 / b + 1 / new)
        seconds = waits + b @ terms.c + (new - b) * terms.c + terms.d
        ratios: Floats = np.divide(seconds, room, out=np.full(len(b), np.inf), where=room > 0)
        return ratios

    low, high = np.floor(b), np.ceil(b)
    nearest = np.where(ratio(low) < ratio(high), low, high)
    # One alone may be rounded down; all of them together may miss the target.
    return (nearest if problem.headroom(nearest, cuts) > 0 else high).astype(np.int64)


def paper(problem: Problem, cuts: Ints, batches: Ints) -> Ints:
    """Return the paper's step: T3 and T4 stay at the times of the given batches, so the slowest can only speed up."""
    times = times_of(problem, cuts, batches)
    most = np.floor(largest(problem, cuts, times) * (1 + CLOSE))  # rounding may make a quotient too small
    most = np.maximum(most, problem.smallest)
    start = _feasible(problem, cuts, batches.astype(float), most)
    found = rounded(problem, cuts, newton_jacobi(problem, cuts, times, start), most)
    return found if problem.headroom(found, cuts) > 0 else np.ceil(_feasible(problem, cuts, found, most)).astype(int)


def _feasible(problem: Problem, cuts: Ints, batches: Ints | Floats, most: Floats) -> Floats:
    """Return the batches, doubled until the target is within reach, each up to its largest."""
    if (most < problem.smallest).any() or problem.headroom(most, cuts) <= 0:
        raise InfeasibleError("infeasible_eps", UNREACHABLE.format(target=problem.target))
    b = np.asarray(batches, dtype=float)
    while problem.headroom(b, cuts) <= 0:
        b = np.minimum(2 * b, most)
    return b


def joint(problem: Problem, cuts: Ints) -> Ints:
    """Return the best batch sizes for these cuts, over all T3 and T4."""
    here, terms = problem.table.at(cuts), _terms(problem, cuts)
    most = np.floor(here.capacity)
    b = _feasible(problem, cuts, problem.smallest, most)
    times, price = (0.0, 0.0), np.inf
    for _ in range(MOST_RATIOS):
        ratio = problem.seconds_per_round(b, cuts) / problem.headroom(b, cuts)
        if ratio >= price * (1 - 1e-7):
            break
        price = ratio
        times = _best_times(here, terms, most, price)
        b = np.minimum(_wanted(terms, most, price), np.minimum(times[0] / here.there, times[1] / here.back))
    return _whole(problem, cuts, price, times)


def _wanted(terms: _Terms, most: Floats, price: float) -> Floats:
    """Return the best batch of each device if none waited for it; `price`: seconds that a unit of headroom is worth."""
    with np.errstate(divide="ignore", invalid="ignore"):
        free = np.where(terms.c > 0, np.sqrt(price * terms.b / terms.c), np.inf)
    return np.clip(free, terms.least, most)


def _best_times(here: CostTable, terms: _Terms, most: Floats, price: float) -> Times:
    """Return T3 and T4 that minimise seconds less price times headroom: convex in T3, with the best T4 for each."""
    free = _wanted(terms, most, price)
    low = (terms.least * here.there).max()  # the smallest batch for everyone
    high = max(low, min((free * here.there).max(), np.sqrt(price * terms.b * here.there.sum())))
    for _ in range(ZOOMS):
        t3 = np.geomspace(low, high, GRID)
        limit = np.minimum(free, t3[:, None] / here.there)
        t4 = _best_back(here.back, limit, terms, price)
        b = np.minimum(limit, t4[:, None] / here.back)
        k = int((t3 + t4 + b @ terms.c + price * terms.b * (1 / b).sum(axis=1)).argmin())
        low, high = t3[max(k - 1, 0)], t3[min(k + 1, GRID - 1)]
    return float(t3[k]), float(t4[k])


def _best_back(back: Floats, limit: Floats, terms: _Terms, price: float) -> Floats:
    """Return the best T4 if each device takes at most `limit`, for each row of it.

    T4 limits a device below T4 = limit * back. The slope in T4 for the first k devices that it limits is zero at a root
    that grows with k as long as T4 limits the k-th there; so the best T4 is the largest of min(limit of the k-th, root
    of the first k).
    """
    bound = limit * back
    order = np.argsort(-bound, axis=1)
    sums = np.cumsum(back[order], axis=1), np.cumsum((terms.c / back)[order], axis=1)
    roots = np.sqrt(price * terms.b * sums[0] / (1 + sums[1]))
    best = np.minimum(np.take_along_axis(bound, order, axis=1), roots).max(axis=1)
    times: Floats = np.maximum(best, (terms.least * back).max())
    return times


def _whole(problem: Problem, cuts: Ints, price: float, times: Times) -> Ints:
    """Return whole batch sizes, found by trying values of T3 and T4: a limit changes many batches at once.

    It tries values within a factor of two in both directions first, then those next to the best.
    """
    here, terms = problem.table.at(cuts), _terms(problem, cuts)
    most = np.floor(here.capacity)
    best, batches = np.inf, problem.smallest
    for near in (False, True):
        t3, t4 = (
            _nearest(time, each) if near else np.geomspace(time / 2, 2 * time, CANDIDATES)
            for time, each in zip(times, (here.there, here.back), strict=True)
        )
        wanted = np.minimum(_wanted(terms, most, price), np.minimum(t3.max() / here.there, t4.max() / here.back))
        wanted = _better_neighbour(wanted, terms, price)
        back = np.minimum(wanted, np.floor(t4[:, None] / here.back * (1 + CLOSE)))
        for there in np.floor(t3[:, None] / here.there * (1 + CLOSE)):
            b = np.maximum(np.minimum(there, back), terms.least)
            ratios = _ratios(b, here, terms)
            k = int(ratios.argmin())
            if ratios[k] < best:
                best, batches = float(ratios[k]), b[k]
        if best < np.inf:
            price = best
            times = float((batches * here.there).max()), float((batches * here.back).max())
    return _feasible(problem, cuts, batches, most).astype(np.int64)


def _better_neighbour(wanted: Floats, terms: _Terms, price: float) -> Floats:
    """Round each batch down or up, whichever costs less at this price."""
    low = np.floor(wanted)
    above = price * terms.b > terms.c * low * (low + 1)  # one more sample is worth its server time
    return np.where(above & (low < wanted), low + 1, low)


def _ratios(batches: Floats, here: CostTable, terms: _Terms) -> Floats:
    """Return the seconds of a round over the headroom, for each row."""
    room = terms.a - terms.b * (1 / batches).sum(axis=1)
    waits = (batches * here.there).max(axis=1) + (batches * here.back).max(axis=1)
    ratios: Floats = np.full(len(batches), np.inf)
    np.divide(waits + batches @ terms.c + terms.d, room, out=ratios, where=room > 0)
    return ratios


def _nearest(time: float, per_sample: Floats) -> Floats:
    """Return the times next to this one at which the largest batch of a device changes."""
    count = np.floor(time / per_sample)
    steps = np.unique(np.concatenate([(count + k) * per_sample for k in (-1, 0, 1, 2)]))
    closest = np.argsort(np.abs(steps - time), kind="stable")[:CANDIDATES]
    nearest: Floats = steps[closest]
    return nearest
