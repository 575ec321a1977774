"""Compare finished runs with each other and with a paper: a metric, rounds and time to a target, speed-up."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from cutlayer import recipes
from cutlayer.errors import ConfigError, CutlayerError
from cutlayer.recipes.recipe import Axis, Published, Race, Recipe, Statement
from cutlayer.recipes.scale import unscaled
from cutlayer.results import measures
from cutlayer.results.ground import Ground, common_ground, longest_rounds
from cutlayer.results.measures import ACCURACY, Measure
from cutlayer.results.paired import Difference, above
from cutlayer.results.surroundings import numbers_of_rounds, warnings
from cutlayer.results.trials import Group, Reach, Span, Spread, Trial, crossed, find, grouped, load
from cutlayer.runs import config
from cutlayer.runs.config import Run
from cutlayer.runs.convergence import LEAST_GAIN, PATIENCE
from cutlayer.runs.folder import Folder
from cutlayer.runs.metrics import Goal

__all__ = ["Comparison", "Panel", "compare", "find"]

ALONE = "no target: this run has no other to be compared with; `cutlayer compare --target` sets one"
CONVERGED = (
    f"converged: the first evaluation after which {PATIENCE} more raise the best accuracy by less than "
    f"{100 * LEAST_GAIN:g} points in all"
)
# How many times the samples of one run's rounds another's may have:
TOLD = 1.05  # without a warning
LONGER = 1.25  # in a comparison by rounds
DIRECTIONS = ("up", "down", "inter_server")
# Settings that may differ from the recipe's without making it another experiment.
INCIDENTAL = (
    "name",
    "seed",
    "engine",
    "server_engine",
    "chunk",
    "device",
    "cpu_threads",
    "per_client",
    "meters",
    "checkpoint_every",
    "until_converged",
    "until_accuracy",
)


class Factor(NamedTuple):
    """A ratio, and the range that it is known to lie in: infinite above if the value is a lower bound."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, above: Span, below: Span) -> "Factor | None":
        """Return the ratio of two spans; None if they are too coarse to tell which of them is larger."""
        if not below.low:
            return None
        found = cls(above.high / below.high, above.low / below.high, above.high / below.low)
        return found if found.exact or not found.low <= 1 <= found.high else None

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def as_dict(self) -> dict[str, float | None]:
        """Return the ratio for JSON, which has no infinity."""
        return {**self._asdict(), "high": None if math.isinf(self.high) else self.high}


ITSELF = Factor(1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Groups that are compared, the value they race to, and the group they are measured against."""

    name: str  # what the names of its runs have in common
    groups: tuple[Group, ...]  # what is compared of them: common seeds, common evaluations
    whole: tuple[Group, ...]  # the same groups with everything that they have
    ground: Ground
    reference: Group
    target: float | None  # None if nothing was measured, or for a run alone
    rule: str  # where the target comes from
    recipe: Recipe  # without runs if none is known by the panel's name
    race: Race
    lengths: tuple[str, ...] = ()  # warnings about rounds of different lengths

    @property
    def measure(self) -> Measure:
        """What the runs are compared by."""
        return self.reference.measure

    @property
    def axis(self) -> Axis:
        """What runs are compared by, and learning curves drawn against."""
        return self.recipe.axis

    @property
    def timed(self) -> bool:
        """Whether any run has simulated time."""
        return any(group.simulated is not None for group in self.groups)

    @property
    def references(self) -> tuple[Group, ...]:
        """The groups that speed-ups are relative to."""
        found = [self.reference_of(group) for group in self.groups]
        return tuple(group for group in self.groups if any(group is other for other in found))

    def reach(self, group: Group) -> Reach:
        return group.reach(self.target)

    def reference_of(self, group: Group) -> Group | None:
        """Return the group that this one's speed-up is relative to; None if that run of the recipe is missing."""
        against = self.recipe.against.get(unscaled(group.run.name))
        if against is None:
            return self.reference
        return next((g for g in self.groups if unscaled(g.run.name) == against), None)

    def speed_up(self, group: Group) -> Factor | None:
        """Return how many times fewer rounds, or samples, it needs than its reference.

        None if a seed fails, if there is nothing in common, if the evaluations are too coarse to tell, or if runs race
        for time.
        """
        reference = self.reference_of(group)
        if reference is None or not self.ground.firm or self.race != "rounds":
            return None
        ours, theirs = self._cost(group), self._cost(reference)
        if ours is None or theirs is None:
            return None
        return ITSELF if group is reference else Factor.of(theirs, ours)

    def _cost(self, group: Group) -> Span | None:
        """Return the samples or rounds to the target; None unless every seed arrives."""
        if self.axis == "samples":
            return group.samples_to(self.target)
        reach = self.reach(group)
        return reach.rounds if reach.by_all else None

    def difference(self, group: Group) -> Difference | None:
        """Return by how much its best value is above its reference's, seed by seed; None for the reference."""
        reference = self.reference_of(group)
        if reference is None or group is reference or not self.ground.firm:
            return None
        return above(group, reference)

    @property
    def best(self) -> Group | None:
        """The group with the best mean of best values."""
        known = [(group.best.mean, group) for group in self.groups if group.best is not None]
        return max(known, key=lambda pair: self.measure.rank(pair[0]))[1] if known else None

    @cached_property
    def winner(self) -> Group | None:
        """The group whose best value is better than each other's with 95 % confidence, if there is one."""
        best = self.best
        if best is None or not self.ground.firm:
            return None
        leads = [above(best, other) for other in self.groups if other is not best and other.best is not None]
        rank = self.measure.rank
        return best if leads and all(d is not None and d.is_certain and rank(d.mean) > 0 for d in leads) else None

    def arrival(self, group: Group) -> Reach:
        """Return when the group reaches its goal: the target, or convergence."""
        return group.convergence.reach if self.race == "converged" else self.reach(group)

    def times_reference(self, group: Group) -> Factor | None:
        """Return its simulated time over its reference's; a lower bound if not every seed reaches the target."""
        reference = self.reference_of(group)
        if reference is None or not self.ground.firm:
            return None
        ours, theirs = self.arrival(group), self.arrival(reference)
        if theirs.seconds is None or not theirs.by_all:
            return None
        if group is reference:
            return ITSELF
        if ours.by_all:
            return None if ours.seconds is None else Factor.of(ours.seconds, theirs.seconds)
        # Whether a run has converged shows only later, so the end of one that has not is no bound.
        if self.race == "converged" or ours.at_least is None:
            return None
        least = ours.at_least / theirs.seconds.high
        return Factor(least, least, math.inf)

    def points_below(self, group: Group) -> float | None:
        """Return how many percentage points its converged accuracy is below its reference's; None if a seed fails."""
        reference = self.reference_of(group)
        ours, theirs = group.convergence.of_all, None if reference is None else reference.convergence.of_all
        return None if ours is None or theirs is None else 100 * (theirs.mean - ours.mean)

    @property
    def statements(self) -> tuple[tuple[Statement, float | None], ...]:
        """What the paper states about runs of this panel, each with our number if there is one."""
        if self.measure != ACCURACY:
            return ()
        home = unscaled(self.name)
        return tuple((s, self._ours(s)) for s in self.recipe.statements if s.run.rpartition("/")[0] == home)

    def _ours(self, statement: Statement) -> float | None:
        by_name = {unscaled(g.run.name): g.convergence for g in self.groups if g.convergence.of_all is not None}
        found = [by_name.get(name) for name in (statement.run, *statement.than)]
        spreads = [c and (c.accuracy if statement.measure == "accuracy" else c.reach.spread) for c in found]
        known = [spread.mean for spread in spreads if spread is not None]
        if len(known) < len(found):
            return None
        ours, *others = known
        return 100 * (ours - max(others)) if statement.measure == "accuracy" else min(others) / ours

    def published(self, group: Group) -> Published | None:
        """Return what the paper prints for these runs, whose accuracies it compares."""
        return None if self.measure != ACCURACY else self.recipe.published.get(unscaled(group.run.name))

    @cached_property
    def departures(self) -> tuple[str, ...]:
        """How the runs differ from the recipe's, each difference once."""
        return tuple(dict.fromkeys(line for group in self.groups for line in self.departures_of(group)))

    def original(self, group: Group) -> Run | None:
        """Return the recipe's run that the group repeats."""
        return next((run for run in self.recipe.runs if run.name == unscaled(group.run.name)), None)

    def departures_of(self, group: Group) -> list[str]:
        """Return how the runs of a group differ from the recipe's."""
        original = self.original(group)
        return [] if original is None else _departures(original, group.run)

    def of_seed(self, seed: int) -> "Panel":
        """Return the same comparison of one seed alone."""
        groups = tuple(replace(g, trials=tuple(t for t in g.trials if t.run.seed == seed)) for g in self.groups)
        return replace(self, groups=groups, reference=groups[self.groups.index(self.reference)])

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What makes the comparison less than fair."""
        counts = numbers_of_rounds(self.whole) if self.race == self.axis == "rounds" else ()
        return (*warnings(self.whole), *self.lengths, *counts)

    def as_dict(self) -> dict[str, Any]:
        """Return the panel for JSON: plain numbers, accuracies as shares of 1."""
        return {
            "panel": self.name,
            "metric": self.measure.name,
            "goal": self.measure.goal,
            "axis": self.axis,
            "target": self.target,
            "target_rule": self.rule,
            "reference": self.reference.label,
            "seeds": list(self.ground.seeds),
            "left_out": {label: list(seeds) for label, seeds in self.ground.left_out.items()},
            "warnings": list(self.warnings),
            "source": self.recipe.source or None,
            "departures": list(self.departures),
            "statements": [{**asdict(statement), "ours": ours} for statement, ours in self.statements],
            "claims": list(self.recipe.claims),
            "notes": list(self.recipe.notes),
        }

    def row(self, group: Group) -> dict[str, Any]:
        """Return a group for JSON."""
        reach, published, factor = self.reach(group), self.published(group), self.times_reference(group)
        speed_up, difference, samples = self.speed_up(group), self.difference(group), group.samples_to(self.target)
        return {
            "panel": self.name,
            "label": group.label,
            "name": group.run.name,
            "method": group.run.method.name,
            **({"codecs": group.run.codecs} if group.run.codecs else {}),
            "seeds": [t.run.seed for t in group.trials],
            "folders": [str(t.path) for t in group.trials],
            "rounds": list(group.rounds),
            "trained_rounds": [len(t.history) for t in group.trials],
            "compared_rounds": [list(t.evaluations) for t in group.trials],
            "samples": group.samples,
            f"best_{self.measure.name}": _spread(group.best),
            f"final_{self.measure.name}": _spread(group.final),
            "difference": None if difference is None else {**difference._asdict(), "interval": difference.interval},
            "rounds_to_target": {
                "mean": reach.mean,
                "earliest": None if reach.rounds is None else reach.rounds.low,
                "reached": reach.reached,
                "seeds": reach.seeds,
            },
            "samples_to_target": None if samples is None else {"mean": samples.high, "earliest": samples.low},
            "simulated_seconds": group.simulated,
            "simulated_seconds_to_target": reach.time,
            "speed_up": None if speed_up is None else speed_up.value,
            "speed_up_range": None if speed_up is None else [speed_up.low, speed_up.high],
            "converged": self._converged(group),
            "times_reference": None if factor is None else factor.as_dict(),
            "bytes": {direction: group.bytes(direction) for direction in DIRECTIONS},
            "stopped": group.stopped,
            "seconds": group.seconds,
            "published": None if published is None else asdict(published),
            "per_seed": self.per_seed(group),
        }

    def _converged(self, group: Group) -> dict[str, Any] | None:
        """Return when a group had converged, for JSON; only accuracies are said to converge."""
        if self.measure != ACCURACY:
            return None
        reach, accuracy = group.convergence
        return {
            "accuracy": _spread(accuracy),
            "round": reach.mean,
            "simulated_seconds": _spread(reach.spread),
            "seeds": reach.reached,
        }

    def per_seed(self, group: Group) -> list[dict[str, Any]]:
        """Return the values of every seed of a group, including those that are not compared."""
        compared = {trial.run.seed: trial for trial in group.trials}
        (whole,) = (other for other in self.whole if other.label == group.label)
        trials = [compared.get(trial.run.seed, trial) for trial in whole.trials]
        return [{"seed": t.run.seed, "compared": t.run.seed in compared, **self._values(t)} for t in trials]

    def _values(self, trial: Trial) -> dict[str, Any]:
        arrival = trial.arrival(trial.rounds_to(self.target))
        return {
            "rounds": trial.rounds,
            "trained_rounds": len(trial.history),
            "evaluations": len(trial.evaluations),
            "samples": trial.end["samples"],
            f"best_{self.measure.name}": trial.best,
            f"final_{self.measure.name}": trial.final,
            "rounds_to_target": None if arrival is None else arrival.round,
            "earliest_round": None if arrival is None else arrival.earliest,
            "samples_to_target": None if arrival is None else trial.samples[arrival.round],
            "simulated_seconds_to_target": None if arrival is None else trial.clock.get(arrival.round),
            "bytes_up": crossed(trial.end, "up"),
            "bytes_down": crossed(trial.end, "down"),
            "stopped": trial.stopped,
            "seconds": trial.seconds,
            "folder": str(trial.path),
        }


@dataclass(frozen=True)
class Comparison:
    """Panels in the order in which a paper prints them."""

    panels: tuple[Panel, ...]
    skipped: tuple[str, ...] = ()  # folders that could not be read, and why

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was left out, and what makes the comparison less than fair."""
        several = len(self.panels) > 1
        found = [f"{p.name}: {line}" if several and p.name else line for p in self.panels for line in p.warnings]
        return (*self.skipped, *found)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON: the panels, and all runs in one list."""
        return {
            "panels": [panel.as_dict() for panel in self.panels],
            "runs": [panel.row(group) for panel in self.panels for group in panel.groups],
            "warnings": list(self.warnings),
        }


def compare(
    folders: Iterable[Folder],
    target: float | None = None,
    *,
    together: bool = False,
    metric: str | None = None,
    goal: Goal | None = None,
) -> Comparison:
    """Compare runs by how soon they reach a target, in one panel or in panels of names that agree up to the last word.

    The metric is by default the accuracy, or else the first that all runs of a panel have. The target is the recipe's,
    by default a share of FedAvg's best value in the panel. `goal` is that of a metric which cutlayer does not know.
    """
    trials, skipped = _readable(folders)
    given = (
        None if metric is None else measures.named(metric, [t.history for t in trials], goal or _mode(trials, metric))
    )
    homes: dict[str, list[Trial]] = {}
    for trial in trials:
        homes.setdefault("" if together else trial.run.name.rpartition("/")[0], []).append(trial)
    panels = [_panel(name, _measured_by(home, given), target) for name, home in homes.items()]
    return Comparison(tuple(panels), tuple(skipped))


def _mode(trials: Sequence[Trial], metric: str) -> Goal | None:
    """Return whether the metric should rise or fall, as a run that monitors it says."""
    return next((t.run.mode for t in trials if t.run.monitor in (metric, f"test_{metric}") and t.run.mode), None)


def _measured_by(trials: Sequence[Trial], given: Measure | None) -> list[Trial]:
    measure = given or measures.default([t.history for t in trials])
    return [replace(trial, measure=measure) for trial in trials]


def _readable(folders: Iterable[Folder]) -> tuple[list[Trial], list[str]]:
    """Return the runs that have finished a round, and why the others are left out; refuse folders without any."""
    trials, skipped, errors = [], [], []
    for folder in folders:
        try:
            trial = load(folder)
        except CutlayerError as error:
            errors.append(error)
            skipped.append(f"{folder.path} is left out: {error}")
            continue
        if trial.history:
            trials.append(trial)
        else:
            skipped.append(f"{folder.path} is left out: it has not finished a round yet")
    if trials:
        return trials, skipped
    if errors:
        raise errors[0]
    raise ConfigError("none of these runs has finished a round yet; try again later")


def _panel(name: str, trials: Sequence[Trial], target: float | None) -> Panel:
    found = grouped(trials)
    by_samples = any(group.run.until_samples for group in found)
    asked = recipes.of(name) or Recipe(runs=(), axis="samples" if by_samples else "rounds")
    recipe, lengths = _by_what(asked, found)
    whole = _in_order(found, [run.name for run in recipe.runs])
    measure = found[0].measure
    if target is not None:
        measure.check_target(target)
    by_convergence = recipe.race == "converged" and target is None and measure == ACCURACY
    race = "time" if recipe.race == "converged" and not by_convergence else recipe.race
    ground = common_ground(whole, race, recipe.axis)
    groups = ground.groups
    reference, about = _reference(groups) if asked.race == "rounds" else (groups[0], groups[0].label)
    if target is not None:
        goal, rule = target, "as given"
    elif unscaled(name) in recipe.targets and measure == ACCURACY:
        goal, rule = recipe.targets[unscaled(name)], f"as the {'paper' if recipe.of_paper else 'recipe'} sets it"
    elif race == "converged":
        goal, rule = None, CONVERGED
    elif reference.best is None:
        goal, rule = None, f"no {measure.words} was measured"
    elif len(groups) == 1:
        goal, rule = None, ALONE
    else:
        goal, rule = _share(measure, recipe.share, reference.best.mean, about)
    return Panel(
        name=name,
        groups=groups,
        whole=whole,
        ground=ground,
        reference=reference,
        target=goal,
        rule=rule,
        recipe=recipe,
        race=race,
        lengths=lengths,
    )


def _by_what(recipe: Recipe, groups: Sequence[Group]) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with a race that is fair if rounds differ in length, and a warning that they do."""
    longest = longest_rounds(groups)
    if recipe.race != "rounds" or recipe.axis != "rounds" or longest <= TOLD:
        return recipe, ()
    samples = "; ".join(f"{g.label} {g.samples / fmean(g.rounds):,.0f}" for g in groups)
    told = f"; samples a round: {samples}"
    if longest <= LONGER:
        return recipe, (f"rounds differ in length, so a speed-up in rounds is off by as much{told}",)
    if all(group.simulated is not None for group in groups):
        by_time = replace(recipe, race="time", axis="time")
        return by_time, (f"rounds differ in length, so runs are compared by simulated time{told}",)
    return replace(recipe, axis="samples"), (f"rounds differ in length, so runs are compared by samples{told}",)


def _share(measure: Measure, share: float, best: float, about: str) -> tuple[float, str]:
    """Return the target that a share of the best value makes, and the rule in words."""
    target, words = measure.share_of(share, best), f"the best {measure.words} of {about}"
    return target, f"{share:g} × {words}" if target == share * best else f"{words} ÷ {share:g}"


def _in_order(groups: Sequence[Group], names: Sequence[str]) -> tuple[Group, ...]:
    """Sort the groups as the recipe's runs; others follow in their own order."""
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(groups, key=lambda group: places.get(unscaled(group.run.name), len(names))))


def _reference(groups: Sequence[Group]) -> tuple[Group, str]:
    """Return FedAvg if it is among the runs, else the best run; and how to call it."""

    def best(some: Sequence[Group]) -> Group:
        return max(some, key=lambda g: g.measure.rank(None if g.best is None else g.best.mean))

    fedavg = [g for g in groups if g.run.method.name == "fedavg"]
    # A run of that name may have options; others without any may be FedAvg with another optimiser, such as FedProx.
    named = [g for g in fedavg if g.run.name.rpartition("/")[2] == "fedavg"]
    plain = [g for g in fedavg if not g.run.method.options]
    if named or plain:
        chosen = best(named or plain)
        return chosen, chosen.label if chosen.label == "fedavg" else f"FedAvg, {chosen.label}"
    chosen = best(groups)
    return chosen, f"all runs, that of {chosen.label}"


def _departures(theirs: Run, ours: Run) -> list[str]:
    then, now = (config.flat(config.as_dict(run)) for run in (theirs, ours))
    keys = [key for key in dict.fromkeys([*then, *now]) if key not in INCIDENTAL]
    return [f"{key} {_word(now, key)} instead of {_word(then, key)}" for key in keys if then.get(key) != now.get(key)]


def _word(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    if value is None:
        return "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _spread(spread: Spread | None) -> dict[str, float | None] | None:
    return None if spread is None else asdict(spread)
