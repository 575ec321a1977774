"""Policies for a round's batch sizes and cuts (HASFL, section VII): planned, random, by resources, or fixed."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from cutlayer.core import keys
from cutlayer.core.checks import check
from cutlayer.core.tree import storable
from cutlayer.errors import ConfigError, InfeasibleError, UnknownNameError
from cutlayer.planning import batch_sizes, cut_layers, planner
from cutlayer.planning.devices import Devices
from cutlayer.planning.planner import MODES, Mode
from cutlayer.planning.problem import Bound, Costs, Fleet, Ints, Problem

log = logging.getLogger("cutlayer")

BatchRule = Literal["planned", "random", "fixed"]
CutRule = Literal["planned", "random", "resources", "fixed"]
MOST_SAMPLES = 2**40  # more than any client has
Ids = tuple[int, ...]
ByClient = dict[int, int]
Room = Callable[[int, int], int]

# The paper's five policies: the rules for the batch sizes and for the cuts.
BASELINES: dict[str, tuple[BatchRule, CutRule]] = {
    "hasfl": ("planned", "planned"),
    "rbs_hams": ("random", "planned"),
    "habs_rms": ("planned", "random"),
    "rbs_rms": ("random", "random"),
    "rbs_rhams": ("random", "resources"),
}


@storable
class RoundPlan(NamedTuple):
    """The batch size and the cut of every client that takes part, with notes on what had to be changed."""

    batches: ByClient
    cuts: ByClient
    notes: tuple[str, ...] = ()  # each a name such as infeasible_memory, then what happened
    asked: Ids = ()  # the clients that it was made for, some of which may be left out; empty if not recorded


class _Round(NamedTuple):
    """What a plan of a round depends on."""

    ids: Ids
    batch: int
    cut: int
    samples: Mapping[int, int]
    room: Room  # the largest batch of a client at a cut
    key: int = 0
    bound: Bound | None = None
    previous: RoundPlan | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Plans a round by a rule for the batch sizes and one for the cuts; a tuple gives them by client number."""

    batches: BatchRule | tuple[int, ...] = "planned"
    cuts: CutRule | tuple[int, ...] = "planned"
    mode: Mode = "joint"  # of the planner, if it finds both
    interval: int = 15  # mini-batches between aggregations
    least_batch: int = 1  # no planned batch is smaller, unless a client has fewer samples
    random_batch: tuple[int, int] = (1, 64)  # from, to
    devices: Devices | None = None  # if given, every batch fits their memory
    costs: Costs | None = None  # of the model's layers

    def __post_init__(self) -> None:
        _check_rule("batches", self.batches, get_args(BatchRule))
        _check_rule("cuts", self.cuts, get_args(CutRule))
        check(self.mode in MODES, "mode", self.mode, " or ".join(map(repr, MODES)))
        for name in ("interval", "least_batch"):
            check(_is_count(getattr(self, name)), name, getattr(self, name), "a whole number from 1 up")
        limits = self.random_batch
        ordered = len(limits) == 2 and all(map(_is_count, limits)) and limits[0] <= limits[1]
        check(ordered, "random_batch", limits, "two whole numbers from 1 up, the smaller one first")
        self._check_needs()

    def _check_needs(self) -> None:
        for name, rule in (("batches", self.batches), ("cuts", self.cuts)):
            if rule in ("planned", "resources") and self.devices is None:
                raise ConfigError(
                    f"{name} = {rule!r} needs devices, how fast each client is: [devices] of a run, or in Python the "
                    "devices and the costs of hasfl, such as costs=cutlayer.profile(model, sample)"
                )
        if self.costs is None and (self.devices is not None or self.cuts == "random"):
            what = "a policy with devices" if self.devices is not None else "cuts = 'random'"
            raise ConfigError(f"{what} needs costs: what each layer of the model takes; give Costs.of(profile)")
        if self.cuts == "random" and self._num_layers < 2:
            raise ConfigError("cuts = 'random' needs a model of 2 layers or more: one at the client, one at the server")
        if self.batches == "planned" and self.cuts == "resources":
            raise ConfigError(
                "cuts = 'resources' are found for given batches, and batches = 'planned' for given cuts; take random "
                "or fixed batches, or plan both"
            )

    @property
    def estimates(self) -> bool:
        """Whether it needs a bound, which is estimated from gradients."""
        return "planned" in (self.batches, self.cuts)

    @property
    def steady(self) -> bool:
        """Whether the deepest cut is the same in every round, whoever takes part."""
        return self.cuts == "fixed" or (isinstance(self.cuts, tuple) and len(set(self.cuts)) == 1)

    @property
    def smallest_batch(self) -> int | None:
        """The smallest batch of any client in any round; None if it is that of the run."""
        if isinstance(self.batches, tuple):
            return min(self.batches)
        return {"planned": self.least_batch, "random": self.random_batch[0]}.get(self.batches)

    def of_at_least(self, batch: int) -> "Policy":
        """Return the same policy with no batches smaller than this, for clients that have as many samples."""
        low, high = (max(batch, limit) for limit in self.random_batch)
        fixed = tuple(max(batch, b) for b in self.batches) if isinstance(self.batches, tuple) else self.batches
        return replace(self, least_batch=max(batch, self.least_batch), random_batch=(low, high), batches=fixed)

    @property
    def largest_batch(self) -> int:
        """The largest batch that the rule allows; a client never takes more than it has samples."""
        if isinstance(self.batches, tuple):
            return max(self.batches)
        return {"random": self.random_batch[1], "fixed": 1}.get(self.batches, MOST_SAMPLES)

    @property
    def lowest_cut(self) -> int | None:
        """The fewest units at any client in any round; None if it is the run's cut."""
        if isinstance(self.cuts, tuple):
            return min(self.cuts)
        return None if self.cuts == "fixed" else 1

    @property
    def num_clients(self) -> int | None:
        """The length of the lists of batches and cuts; None if there is no list."""
        lists = [len(rule) for rule in (self.batches, self.cuts) if isinstance(rule, tuple)]
        if len(set(lists)) > 1:
            raise ConfigError(f"hasfl has {lists[0]} batches and {lists[1]} cuts; give one of each for each client")
        return lists[0] if lists else None

    def __call__(
        self,
        ids: Ids,
        *,
        batch: int,
        cut: int,
        samples: Mapping[int, int],
        key: int,
        bound: Bound | None,
        previous: RoundPlan | None,
    ) -> RoundPlan:
        """Return the plan of these clients; `batch` and `cut` are the fixed ones, `key` is the round's own."""
        now, notes = self._begun(_Round(ids, batch, cut, samples, self._room(ids, samples), key, bound, previous))
        try:
            found = self._found(now)
        except InfeasibleError as error:
            found = self._kept(now, error)
        notes += found.notes
        _tell_new(notes, previous)
        return self._capped(now, found, notes)

    def probe(self, ids: Ids, *, batch: int, cut: int, samples: Mapping[int, int]) -> RoundPlan:
        """Return the same batch size and cut for everyone, as far as they fit, before the loss is known."""
        now, notes = self._begun(_Round(ids, batch, cut, samples, self._room(ids, samples)))
        return self._capped(now, self._fixed(now), notes)

    def _begun(self, everyone: _Round) -> tuple[_Round, tuple[str, ...]]:
        """Return the round with the clients that can take part, and a note on each of the others."""
        self._check_cut("cut", everyone.cut)
        taking, notes = self._those_that_fit(everyone)
        return everyone._replace(ids=taking), notes

    def _capped(self, now: _Round, plan: RoundPlan, notes: tuple[str, ...]) -> RoundPlan:
        """Return the plan with each batch limited to what its client can hold."""
        return RoundPlan({j: min(plan.batches[j], now.room(j, plan.cuts[j])) for j in now.ids}, plan.cuts, notes)

    def _found(self, now: _Round) -> RoundPlan:
        if now.bound is None and self.estimates:
            raise ConfigError("a plan needs a bound: estimate one before the first round")
        if self.batches != "planned" and self.cuts not in ("planned", "resources"):
            return RoundPlan(self._given_batches(now), self._given_cuts(now))
        ids, problem = now.ids, self._problem(now.ids, now.samples, now.bound)
        if self.batches == "planned" and self.cuts == "planned":
            planned = planner.solve(problem, mode=self.mode)
            return RoundPlan(_by_client(ids, planned.plan.batches), _by_client(ids, planned.plan.cuts), planned.notes)
        if self.batches == "planned":
            cuts = self._given_cuts(now)
            return RoundPlan(_by_client(ids, batch_sizes.joint(problem, _array(ids, cuts))), cuts)
        batches = self._given_batches(now)
        fitting = _array(ids, {j: min(batches[j], now.room(j, 1)) for j in ids})
        if self.cuts == "resources":
            return RoundPlan(batches, _by_client(ids, by_resources(problem, fitting)))
        before = None if (kept := _previous(now)) is None else _array(ids, kept.cuts)
        return RoundPlan(batches, _by_client(ids, cut_layers.best(problem, fitting, before)))

    def _kept(self, now: _Round, error: InfeasibleError) -> RoundPlan:
        """Return the previous plan, or a fixed one, for what was to be planned; random rules still apply."""
        kept, told = _previous(now), "the previous plan is kept"
        if kept is None:
            kept, told = self._fixed(now), f"batch size {now.batch} and cut {now.cut} are used as far as they fit"
        return RoundPlan(
            kept.batches if self.batches == "planned" else self._given_batches(now),
            kept.cuts if self.cuts == "planned" else self._given_cuts(now),
            (f"{error.why}: {told}, because {error}",),
        )

    def _fixed(self, now: _Round) -> RoundPlan:
        """Return the same for everyone; a device that cannot hold the smallest batch at that cut gets fewer layers."""
        cuts = {
            j: max(cut for cut in range(1, now.cut + 1) if now.room(j, cut) >= self._least(now, j)) for j in now.ids
        }
        return RoundPlan(dict.fromkeys(now.ids, now.batch), cuts)

    # -- rules that look at one client alone ------------------------------------------------------------------------

    def _given_batches(self, now: _Round) -> ByClient:
        if self.batches == "random":
            low, high = self.random_batch
            return {j: int(keys.generator(now.key, "batch", j).integers(low, high + 1)) for j in now.ids}
        return {j: _own("batches", self.batches, j, now.batch) for j in now.ids}

    def _given_cuts(self, now: _Round) -> ByClient:
        if self.cuts == "random":
            return {j: self._random_cut(now, j) for j in now.ids}
        return self._fixed_cuts(now)

    def _random_cut(self, now: _Round, client: int) -> int:
        """Draw a cut, again until the smallest batch fits."""
        draw = keys.generator(now.key, "cut", client)
        while True:
            cut = int(draw.integers(1, self._num_layers))
            if now.room(client, cut) >= self._least(now, client):
                return cut

    def _fixed_cuts(self, now: _Round) -> ByClient:
        cuts = {j: _own("cuts", self.cuts, j, now.cut) for j in now.ids}
        for j, cut in cuts.items():
            self._check_cut(f"the cut of client {j}", cut)
        return cuts

    def _check_cut(self, name: str, cut: int) -> None:
        if self.costs is not None:
            check(1 <= cut <= self._num_layers, name, cut, f"a number of layers from 1 to {self._num_layers}")

    # -- what the devices allow -------------------------------------------------------------------------------------

    @property
    def _num_layers(self) -> int:
        assert self.costs is not None  # as checked
        return len(self.costs.forward)

    def _room(self, ids: Ids, samples: Mapping[int, int]) -> Room:
        """Return the largest batch as a function of client and cut, by its samples and the memory of its device."""
        if self.devices is None:
            return lambda client, cut: samples[client]
        capacity = self._problem(ids, samples).table.capacity
        rows = dict(zip(ids, np.floor(capacity).astype(np.int64).tolist(), strict=True))
        return lambda client, cut: int(rows[client][cut - 1])

    def _those_that_fit(self, now: _Round) -> tuple[Ids, tuple[str, ...]]:
        """Return the clients that hold the smallest batch at their cut (1 if it is not fixed), and notes on others."""
        free = self.cuts in ("planned", "random", "resources")
        cuts = dict.fromkeys(now.ids, 1) if free else self._fixed_cuts(now)
        fits = tuple(j for j in now.ids if now.room(j, cuts[j]) >= self._least(now, j))
        if not fits:
            raise InfeasibleError(
                "infeasible_memory",
                f"no client holds {_counted(self._least(now, now.ids[0]))} and the layers of its cut; give the devices "
                "more memory, or a smaller cut",
            )
        notes = (
            f"infeasible_memory: client {j} is left out, because it does not hold {_counted(self._least(now, j))} and "
            f"the layers of cut {cuts[j]}; give its device more memory{'' if cuts[j] == 1 else ', or a smaller cut'}"
            for j in now.ids
            if j not in fits
        )
        return fits, tuple(notes)

    def _least(self, now: _Round, client: int) -> int:
        """Return the smallest batch that a client must hold."""
        return max(min(self.least_batch, now.samples[client]), 1) if self.batches == "planned" else 1

    def _problem(self, ids: Ids, samples: Mapping[int, int], bound: Bound | None = None) -> Problem:
        """Return the planner's problem for these clients; without a bound only its memory and times are meaningful."""
        assert self.costs is not None and self.devices is not None  # as checked
        return Problem(
            costs=self.costs,
            fleet=Fleet.of(self.devices, ids),
            bound=bound or _no_bound(self._num_layers),
            interval=self.interval,
            samples=np.array([samples[j] for j in ids], dtype=np.int64),
            least=self.least_batch,
        )


def by_resources(problem: Problem, batches: Ints) -> Ints:
    """Return the cuts at which each device and its share of the server take the least time, whatever the others choose.

    Convergence is ignored, so the bound is not used. Among cuts that take the same time, the first is chosen.
    """
    costs, fleet, one = problem.costs, problem.fleet, problem.table
    step = batches[:, None] * (one.there + one.back + problem.num_devices * one.server)
    models = np.outer(1 / fleet.fed_up + 1 / fleet.fed_down, costs.model) / problem.interval
    cuts: Ints = np.where(batches[:, None] <= one.capacity, step + models, np.inf).argmin(axis=1) + 1
    return cuts


def _tell_new(notes: tuple[str, ...], previous: RoundPlan | None) -> None:
    """Log notes that the previous plan did not have, compared by name: the numbers in them change every round."""
    known = {note.partition(":")[0] for note in previous.notes} if previous is not None else set()
    for note in notes:
        if note.partition(":")[0] not in known:
            log.warning("%s", note)


def _counted(samples: int) -> str:
    return "one sample" if samples == 1 else f"{samples} samples"


def _no_bound(num_layers: int) -> Bound:
    """Return a bound for problems of which only memory and times are used."""
    none = np.zeros(num_layers)
    return Bound(beta=1.0, lr=1.0, noise=none, slope=none, gap=1.0)


def _previous(now: _Round) -> RoundPlan | None:
    """Return the previous plan of these clients, if it included all of them."""
    before = now.previous
    if before is None or not all(j in before.cuts for j in now.ids):
        return None
    return RoundPlan({j: before.batches[j] for j in now.ids}, {j: before.cuts[j] for j in now.ids})


def _own(name: str, rule: Any, client: int, default: int) -> int:
    """Return a client's own number if the rule is a list, or the fixed one."""
    if rule == "fixed":
        return default
    if client >= len(rule):
        raise ConfigError(f"{name} has {len(rule)} numbers, but client {client} takes part; give one for each client")
    return int(rule[client])


def _by_client(ids: Ids, values: Sequence[int] | Ints) -> ByClient:
    return {j: int(value) for j, value in zip(ids, values, strict=True)}


def _array(ids: Ids, values: ByClient) -> Ints:
    return np.array([values[j] for j in ids], dtype=np.int64)


def _check_rule(name: str, rule: Any, known: tuple[str, ...]) -> None:
    if isinstance(rule, str) and rule not in known:
        raise UnknownNameError(f"rule for {name}", rule, known)
    holds = isinstance(rule, str) or (isinstance(rule, tuple) and rule and all(map(_is_count, rule)))
    check(bool(holds), name, rule, f"{', '.join(map(repr, known))}, or a tuple of whole numbers from 1 up")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 1
