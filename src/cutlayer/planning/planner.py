"""The planner (HASFL, Algorithm 2): chooses each device's cut and batch size for the least time until the target."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from cutlayer.errors import ConfigError, InfeasibleError
from cutlayer.planning import batch_sizes, cut_layers
from cutlayer.planning.devices import Devices
from cutlayer.planning.problem import REFERENCE_BATCH, Bound, Costs, Fleet, Ints, Latency, Problem
from cutlayer.planning.profile import Profile

log = logging.getLogger("cutlayer")

Mode = Literal["joint", "paper"]
MODES: tuple[Mode, ...] = ("joint", "paper")
STARTS = (16, 2, 4, 8, 32, 64, 128)  # batch sizes for everyone to start from, the paper's first
CLOSE = 1e-6  # relative gain below which the alternation ends
MOST_TURNS = 50  # 2 to 6 suffice

CutStep = Callable[[Problem, Ints, Ints], Ints]  # new cuts, for these batches and cuts


class Plan(NamedTuple):
    """A batch size and a cut for each device that takes part."""

    batches: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A plan, its times, and notes on what had to be changed for it."""

    problem: Problem  # of the devices that take part
    devices: tuple[int, ...]  # their numbers
    excluded: tuple[int, ...]  # the numbers of those that cannot take part
    plan: Plan  # in the order of `devices`
    before: Plan  # for comparison: a batch of 16 for everyone, and half of the layers
    notes: tuple[str, ...]  # what had to be changed: a name such as infeasible_memory, then what happened

    @cached_property
    def latency(self) -> Latency:
        return self.problem.latency(*self.plan)

    @cached_property
    def latency_before(self) -> Latency:
        return self.problem.latency(*self.before)

    @property
    def seconds(self) -> float:
        """(45) The seconds until the target."""
        return self.problem.seconds(*self.plan)

    @property
    def rounds(self) -> float:
        """(27) The mini-batches until the target."""
        return self.problem.rounds(*self.plan)

    @property
    def seconds_per_round(self) -> float:
        """The seconds of a mini-batch with its share of the aggregation."""
        return self.problem.seconds_per_round(*self.plan)

    @property
    def straggler(self) -> int:
        """The number of the device that takes the longest."""
        return self.devices[self.latency.straggler]

    @property
    def straggler_before(self) -> int:
        return self.devices[self.latency_before.straggler]

    @cached_property
    def bindings(self) -> tuple[str, ...]:
        """What keeps each device's batch from growing: a limit, or "optimum" if a larger one would not pay."""
        problem, batches = self.problem, np.array(self.plan.batches)
        cuts = np.array(self.plan.cuts)
        here = problem.table.at(cuts)
        there, back = batch_sizes.times_of(problem, cuts, batches)
        room = problem.headroom(batches, cuts)
        price = self.seconds_per_round / room if room > 0 else np.inf
        gain = price * problem.noise_rate / (batches * (batches + 1))  # the seconds that one more sample is worth
        samples = np.full(len(batches), np.inf) if problem.samples is None else problem.samples
        names = np.full(len(batches), "optimum", dtype=object)
        names[(batches + 1) * here.back > back] = "downlink and backward"
        names[(batches + 1) * here.there > there] = "forward and uplink"
        names[batches + 1 > here.capacity] = "memory"
        names[batches + 1 > samples] = "samples"
        names[gain <= here.server] = "optimum"
        return tuple(names)


def plan(
    costs: Costs | Profile,
    devices: Devices,
    bound: Bound,
    *,
    interval: int = 15,
    samples: Sequence[int] | None = None,
    least_batch: int = 1,
    mode: Mode = "joint",
) -> Planned:
    """Choose a cut and a batch size for each device, for the least time until a target.

    `costs`: of the model's layers, or its profile. `bound`: what is known about the loss. `interval`: mini-batches
    between aggregations. `samples`: how many each device holds; no batch is larger. `least_batch`: no batch is smaller,
    unless a device has fewer samples; use 4 or more for a model with BatchNorm. `mode`: `joint` chooses the batch sizes
    together with the time limits of the slowest device; `paper` keeps these fixed, as HASFL does.

        profile = cutlayer.profile(models.vgg16(), (3, 32, 32), optimiser_slots=0)
        fast, slow = Device(flops=2e12, up=80e6, down=380e6), Device(flops=1e11, up=10e6, down=50e6)
        devices = Devices(clients=(fast, slow), server=20e12)
        bound = Bound(beta=50, lr=5e-4, noise=np.full(16, 40.0), slope=np.full(16, 0.1), gap=2.3)
        planned = plan(profile, devices, bound)
        planned.plan.batches, planned.plan.cuts, planned.seconds
    """
    if samples is not None and len(samples) != len(devices.clients):
        raise ConfigError(
            f"samples are given for {len(samples)} devices, but there are {len(devices.clients)}; give one number each"
        )
    problem = Problem(
        costs=Costs.of(costs) if isinstance(costs, Profile) else costs,
        fleet=Fleet.of(devices),
        bound=bound,
        interval=interval,
        samples=None if samples is None else np.array(samples, dtype=np.int64),
        least=least_batch,
    )
    planned = solve(problem, mode=mode)
    for note in planned.notes:
        log.warning("%s", note)
    return planned


def solve(problem: Problem, *, mode: Mode = "joint") -> Planned:
    """Return the best plan found; raise if none reaches the target, or none fits any device."""
    if mode not in MODES:
        raise ConfigError(f"mode is {mode!r}; it must be 'joint' or 'paper'")
    taking, notes = _those_that_fit(problem)
    excluded = tuple(sorted(set(range(problem.num_devices)) - set(taking)))
    reduced, more = _reachable(_only(problem, taking))
    notes += more
    found = _best(reduced, mode)
    before = _usual(reduced)
    return Planned(problem=reduced, devices=taking, excluded=excluded, plan=found, before=before, notes=notes)


def _those_that_fit(problem: Problem) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the devices that hold the smallest batch and one layer, and a note on each of the others."""
    fits = problem.capacity(np.ones(problem.num_devices, dtype=int)) >= problem.smallest
    what = "one sample" if problem.least == 1 else f"{problem.least} samples"
    if not fits.any():
        raise InfeasibleError(
            "infeasible_memory",
            f"no device holds {what} and the first layer; give the devices more memory or samples, or cut a smaller "
            "model",
        )
    notes = (
        f"infeasible_memory: device {i} is left out, because it does not hold {what} and the first layer; give it "
        "more memory or samples"
        for i in np.flatnonzero(~fits)
    )
    return tuple(np.flatnonzero(fits).tolist()), tuple(notes)


def _only(problem: Problem, taking: tuple[int, ...]) -> Problem:
    if len(taking) == problem.num_devices:
        return problem
    fleet, ids = problem.fleet, list(taking)
    arrays = {name: getattr(fleet, name)[ids] for name in ("flops", "up", "down", "fed_up", "fed_down", "memory")}
    samples = None if problem.samples is None else problem.samples[ids]
    return replace(problem, fleet=replace(fleet, **arrays), samples=samples)


def _reachable(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """Return the problem with a target that is reachable, and notes if it had to be raised."""
    bound = problem.bound
    drift = problem.drift_rate * float(problem.slopes[0])
    reasons = []
    if not bound.valid:
        reasons.append(f"the learning rate {bound.lr:g} is above 1 / beta = {1 / bound.beta:.3g}")
    if problem.target <= drift:
        reasons.append(f"even the shallowest cut drifts by {drift:.3g}")
    by_rule = replace(problem, bound=replace(bound, target=None))
    if not reasons or by_rule.target <= problem.target:
        return problem, tuple(f"no_theorem: {why}; lower the learning rate or the interval" for why in reasons)
    notes = (
        f"raised_eps: the target {problem.target:.3g} is now {by_rule.target:.3g}, because {why}; lower the learning "
        "rate or the interval"
        for why in reasons
    )
    return by_rule, tuple(notes)


def _usual(problem: Problem) -> Plan:
    """Return the same batch and cut for everyone, as far as they fit."""
    capacity = problem.table.capacity
    batches = np.minimum(REFERENCE_BATCH, capacity[:, 0]).astype(int)
    fitting = (batches[:, None] <= capacity).sum(axis=1)  # memory grows with the cut
    return as_plan(batches, np.minimum(max(problem.num_layers // 2, 1), fitting))


def _best(problem: Problem, mode: Mode) -> Plan:
    """Return the best plan over all starts; joint mode includes the paper's own plan, so it is never worse."""
    plans = list(_from_starts(problem, "paper"))
    if plans:
        plans = [alternate(problem, least(problem, plans), "paper")]
    if mode == "joint":
        plans += _from_starts(problem, "joint")
    if not plans:
        raise InfeasibleError("infeasible_eps", batch_sizes.UNREACHABLE.format(target=problem.target))
    best = least(problem, plans)
    return refine(problem, best) if mode == "joint" else best


def _from_starts(problem: Problem, mode: Mode) -> Iterator[Plan]:
    """Yield the plan that each start leads to, with quick cuts; only the best gets proven ones."""
    for batch in STARTS:
        with suppress(InfeasibleError):  # another start may lead to a plan
            yield alternate(problem, start(problem, batch), mode, cut_layers.quick)


def start(problem: Problem, batch: int) -> Plan:
    """Return the same batch for everyone, as far as it fits with one layer, and cuts for it."""
    wanted = max(batch, problem.least)
    batches = np.minimum(wanted, np.floor(problem.table.capacity[:, 0])).astype(np.int64)
    ones = np.ones_like(batches)
    return as_plan(batches, cut_layers.quick(problem, batches) if problem.headroom(batches, ones) > 0 else ones)


def alternate(problem: Problem, given: Plan, mode: Mode, cut_step: CutStep = cut_layers.best) -> Plan:
    """Run Algorithm 2 from a given plan: batches for the cuts, cuts for the batches, until neither improves."""
    best, value = given, problem.seconds(*given)
    batches, cuts = (np.array(values, dtype=np.int64) for values in given)
    for turn in range(MOST_TURNS):
        last = batches
        batches = batch_sizes.joint(problem, cuts) if mode == "joint" else batch_sizes.paper(problem, cuts, batches)
        if turn > 0 and (batches == last).all():
            break
        cuts = cut_step(problem, batches, cuts)
        seconds = problem.seconds(batches, cuts)
        if seconds < value:
            best = as_plan(batches, cuts)
        if not seconds < value * (1 - CLOSE):
            break
        value = seconds
    return best


def refine(problem: Problem, given: Plan) -> Plan:
    """Improve a plan in joint mode: by Algorithm 2, and by moves of many cuts at once, which it cannot make."""
    best = alternate(problem, given, "joint")
    for _ in range(MOST_TURNS):
        shifted = least(problem, [best, *_shifts(problem, np.array(best.cuts))])
        if not problem.seconds(*shifted) < problem.seconds(*best) * (1 - CLOSE):
            break
        best = alternate(problem, shifted, "joint")
    return best


def _shifts(problem: Problem, cuts: Ints) -> Iterator[Plan]:
    """Yield the plans with all cuts at most, or if memory allows at least, some layer, each with its best batches."""
    fitting = (problem.table.capacity >= problem.smallest[:, None]).sum(axis=1)  # memory grows with the cut
    layers = range(1, problem.num_layers + 1)
    moved = [np.minimum(cuts, j) for j in layers] + [np.minimum(np.maximum(cuts, j), fitting) for j in layers]
    for candidate in np.unique(moved, axis=0):
        with suppress(InfeasibleError):
            yield as_plan(batch_sizes.joint(problem, candidate), candidate)


def least(problem: Problem, plans: Iterable[Plan]) -> Plan:
    return min(plans, key=lambda p: problem.seconds(*p))


def as_plan(batches: Ints, cuts: Ints) -> Plan:
    return Plan(tuple(batches.tolist()), tuple(cuts.tolist()))
