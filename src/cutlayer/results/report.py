"""Finished runs side by side, and beside what a paper prints: accuracy, rounds and time to a target, speed-up."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from cutlayer import recipes
from cutlayer.errors import ConfigError
from cutlayer.recipes.recipe import TARGET_SHARE, Axis, Published, Race, Recipe, Statement
from cutlayer.recipes.scale import unscaled
from cutlayer.results.trials import Group, Reach, Spread, Trial, find, grouped, load
from cutlayer.runs import config
from cutlayer.runs.config import Run
from cutlayer.runs.convergence import LEAST_GAIN, PATIENCE
from cutlayer.runs.folder import Folder

__all__ = ["Comparison", "Panel", "compare", "find"]

ALONE = "no target: this run has no other to be compared with; `cutlayer compare --target` sets one"
CONVERGED = (
    f"converged: the first evaluation after which {PATIENCE} more raise the best accuracy by less than "
    f"{100 * LEAST_GAIN:g} points in all"
)
DIRECTIONS = ("up", "down", "inter_server")
# What is another setting without being another experiment.
INCIDENTAL = (
    "name",
    "seed",
    "engine",
    "chunk",
    "device",
    "cpu_threads",
    "per_client",
    "checkpoint_every",
    "until_converged",
    "until_accuracy",
)


class Factor(NamedTuple):
    """So many times, or at least as many."""

    value: float
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Groups that belong together, the accuracy they are raced to, and the group they are measured against."""

    name: str  # what the names of its runs have in common
    groups: tuple[Group, ...]
    reference: Group
    target: float | None  # none where no accuracy was measured, or for a run alone
    rule: str  # where the target comes from
    recipe: Recipe | None = None
    race: Race = "rounds"

    @property
    def axis(self) -> Axis:
        """What learning curves are drawn against: for runs of no recipe samples, where any of them ends by samples."""
        if self.recipe is not None:
            return self.recipe.axis
        return "samples" if any(group.run.until_samples for group in self.groups) else "rounds"

    @property
    def timed(self) -> bool:
        """Whether any run tells simulated time."""
        return any(group.simulated is not None for group in self.groups)

    @property
    def references(self) -> tuple[Group, ...]:
        """The groups that speed-ups are against."""
        found = [self.reference_of(group) for group in self.groups]
        return tuple(group for group in self.groups if any(group is other for other in found))

    def reach(self, group: Group) -> Reach:
        return group.reach(self.target)

    def reference_of(self, group: Group) -> Group | None:
        """The group that this one's speed-up is against; none where the recipe names a run that is not here."""
        against = None if self.recipe is None else self.recipe.against.get(unscaled(group.run.name))
        if against is None:
            return self.reference
        return next((g for g in self.groups if unscaled(g.run.name) == against), None)

    def speed_up(self, group: Group) -> float | None:
        """How many times fewer rounds, or samples, than the reference; only where every seed of both arrives."""
        reference = self.reference_of(group)
        if reference is None:
            return None
        if self.axis == "samples":
            few, many = (g.samples_to(self.target) for g in (group, reference))
            return None if few is None or many is None else many / few
        ours, theirs = self.reach(group), self.reach(reference)
        if ours.mean is None or theirs.mean is None or not (ours.by_all and theirs.by_all):
            return None
        return theirs.mean / ours.mean

    def arrival(self, group: Group) -> Reach:
        """When the group is where it is raced to: at the target, or converged."""
        return group.convergence.reach if self.race == "converged" else self.reach(group)

    def times_reference(self, group: Group) -> Factor | None:
        """How many times the reference's simulated time; at least as many where not every seed reaches the target."""
        reference = self.reference_of(group)
        if reference is None:
            return None
        ours, theirs = self.arrival(group), self.arrival(reference)
        if theirs.time is None or not theirs.by_all:
            return None
        if ours.by_all:
            return None if ours.time is None else Factor(ours.time / theirs.time, True)
        # Whether a run has converged shows only later, so the end of one that has not is no bound.
        if self.race == "converged" or ours.at_least is None:
            return None
        return Factor(ours.at_least / theirs.time, False)

    def points_below(self, group: Group) -> float | None:
        """How far the converged accuracy is below the reference's, in percentage points; where all seeds converge."""
        reference = self.reference_of(group)
        if reference is None:
            return None
        ours, theirs = group.convergence, reference.convergence
        if ours.accuracy is None or theirs.accuracy is None or not (ours.reach.by_all and theirs.reach.by_all):
            return None
        return 100 * (theirs.accuracy.mean - ours.accuracy.mean)

    @property
    def statements(self) -> tuple[tuple[Statement, float | None], ...]:
        """What the paper states of runs of this panel, each with our number where there is one."""
        stated = () if self.recipe is None else self.recipe.statements
        home = unscaled(self.name)
        return tuple((s, self._ours(s)) for s in stated if s.run.rpartition("/")[0] == home)

    def _ours(self, statement: Statement) -> float | None:
        by_name = {unscaled(g.run.name): g.convergence for g in self.groups}
        run, *others = (by_name.get(name) for name in (statement.run, *statement.than))
        if run is None or not run.reach.by_all:
            return None
        known = [other for other in others if other is not None and other.reach.by_all]
        if len(known) < len(others):
            return None
        if statement.measure == "accuracy":
            return None if run.accuracy is None else 100 * (run.accuracy.mean - max(_mean(o.accuracy) for o in known))
        times = [other.reach.time for other in known if other.reach.time is not None]
        return min(times) / run.reach.time if run.reach.time is not None and len(times) == len(known) else None

    def published(self, group: Group) -> Published | None:
        """What the paper prints for these runs."""
        return None if self.recipe is None else self.recipe.published.get(unscaled(group.run.name))

    @cached_property
    def departures(self) -> tuple[str, ...]:
        """Where runs differ from the recipe's, in words; each once."""
        return tuple(dict.fromkeys(line for group in self.groups for line in self.departures_of(group)))

    def original(self, group: Group) -> Run | None:
        """The recipe's run that a group has."""
        runs = () if self.recipe is None else self.recipe.runs
        return next((run for run in runs if run.name == unscaled(group.run.name)), None)

    def departures_of(self, group: Group) -> list[str]:
        """Where runs of a group differ from the recipe's."""
        original = self.original(group)
        return [] if original is None else _departures(original, group.run)

    def as_dict(self) -> dict[str, Any]:
        """For machines: plain numbers, accuracies as shares of 1."""
        recipe = self.recipe or Recipe(runs=())
        return {
            "panel": self.name,
            "target": self.target,
            "target_rule": self.rule,
            "reference": self.reference.label,
            "source": recipe.source or None,
            "departures": list(self.departures),
            "statements": [{**asdict(statement), "ours": ours} for statement, ours in self.statements],
            "claims": list(recipe.claims),
            "notes": list(recipe.notes),
        }

    def row(self, group: Group) -> dict[str, Any]:
        """A group for machines."""
        reach, published, factor = self.reach(group), self.published(group), self.times_reference(group)
        converged, accuracy = group.convergence
        return {
            "panel": self.name,
            "label": group.label,
            "name": group.run.name,
            "method": group.run.method.name,
            "seeds": [t.run.seed for t in group.trials],
            "folders": [str(t.path) for t in group.trials],
            "rounds": list(group.rounds),
            "samples": group.samples,
            "best_accuracy": _spread(group.best),
            "final_accuracy": _spread(group.final),
            "rounds_to_target": {"mean": reach.mean, "reached": reach.reached, "seeds": reach.seeds},
            "simulated_seconds": group.simulated,
            "simulated_seconds_to_target": reach.time,
            "speed_up": self.speed_up(group),
            "converged": {
                "accuracy": _spread(accuracy),
                "round": converged.mean,
                "simulated_seconds": _spread(converged.spread),
                "seeds": converged.reached,
            },
            "times_reference": None if factor is None else factor._asdict(),
            "bytes": {direction: group.bytes(direction) for direction in DIRECTIONS},
            "stopped": group.stopped,
            "seconds": group.seconds,
            "published": None if published is None else asdict(published),
        }


@dataclass(frozen=True)
class Comparison:
    """Panels, one after another as a paper prints them."""

    panels: tuple[Panel, ...]

    def as_dict(self) -> dict[str, Any]:
        """For machines: what holds for each panel, and all runs in one list."""
        return {
            "panels": [panel.as_dict() for panel in self.panels],
            "runs": [panel.row(group) for panel in self.panels for group in panel.groups],
        }


def compare(folders: Iterable[Folder], target: float | None = None, *, together: bool = False) -> Comparison:
    """Race runs to a target, those whose names agree up to the last word in one panel; or all of them together.

    The target is that of the recipe, by default a share of FedAvg's best accuracy in the panel.
    """
    trials = [trial for folder in folders if (trial := load(folder)).history]
    if not trials:
        raise ConfigError("none of these runs has finished a round yet; try again later")
    homes: dict[str, list[Trial]] = {}
    for trial in trials:
        homes.setdefault("" if together else trial.run.name.rpartition("/")[0], []).append(trial)
    return Comparison(tuple(_panel(name, home, target) for name, home in homes.items()))


def _panel(name: str, trials: Sequence[Trial], target: float | None) -> Panel:
    recipe = recipes.of(name)
    order = [] if recipe is None else [run.name for run in recipe.runs]
    groups = _in_order(grouped(trials), order)
    race: Race = "rounds" if recipe is None else recipe.race
    if target is not None and race == "converged":
        race = "time"
    reference, about = _reference(groups) if race == "rounds" else (groups[0], groups[0].label)
    if target is not None:
        accuracy, rule = target, "as given"
    elif recipe is not None and unscaled(name) in recipe.targets:
        accuracy, rule = recipe.targets[unscaled(name)], f"as the {'paper' if recipe.of_paper else 'recipe'} sets it"
    elif race == "converged":
        accuracy, rule = None, CONVERGED
    elif len(groups) == 1 and reference.best is not None:
        accuracy, rule = None, ALONE
    else:
        accuracy, rule = _share_of(reference, about, TARGET_SHARE if recipe is None else recipe.share)
    return Panel(name=name, groups=groups, reference=reference, target=accuracy, rule=rule, recipe=recipe, race=race)


def _in_order(groups: Sequence[Group], names: Sequence[str]) -> tuple[Group, ...]:
    """As the recipe has them; others stay behind as they come."""
    places = {name: place for place, name in enumerate(names)}
    return tuple(sorted(groups, key=lambda group: places.get(unscaled(group.run.name), len(names))))


def _share_of(reference: Group, about: str, share: float) -> tuple[float | None, str]:
    """The accuracy to reach, and where it comes from."""
    if reference.best is None:
        return None, "no accuracy was measured"
    return share * reference.best.mean, f"{share:g} × the best accuracy of {about}"


def _reference(groups: Sequence[Group]) -> tuple[Group, str]:
    """FedAvg where it is among the runs, else the best run; and how to call it."""

    def best(some: Sequence[Group]) -> Group:
        return max(some, key=lambda g: g.best.mean if g.best is not None else -1.0)

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


def _mean(spread: Spread | None) -> float:
    return math.nan if spread is None else spread.mean


def _spread(spread: Spread | None) -> dict[str, float | None] | None:
    return None if spread is None else {"mean": spread.mean, "std": spread.std}
