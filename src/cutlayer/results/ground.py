"""The common ground of runs that are compared: the seeds that all have, and the evaluations that all have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from cutlayer.recipes.recipe import Axis, Race
from cutlayer.results.trials import Group, Trial
from cutlayer.runs.stopping import ended_early

NEAR = 0.25  # of the gap between two evaluations: how far apart, in samples, evaluations may be that are compared


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What is compared of some groups, and what is not."""

    groups: tuple[Group, ...]
    seeds: tuple[int, ...]  # of every group; none if they have none in common
    left_out: Mapping[str, tuple[int, ...]]  # seeds, by the label of the group
    meets: bool  # whether there is an evaluation that all have

    @property
    def firm(self) -> bool:
        """Whether the groups can be compared at all."""
        return bool(self.seeds) and self.meets


def common_ground(groups: Sequence[Group], race: Race, axis: Axis) -> Ground:
    """Leave what all groups have: seeds, and evaluations by round or, where rounds differ in length, by samples.

    Runs that race for time have no common round, so each keeps its own evaluations.
    """
    seeds = set.intersection(*({t.run.seed for t in group.trials} for group in groups))
    kept = [_with(group, [t for t in group.trials if t.run.seed in seeds]) if seeds else group for group in groups]
    left_out = {
        group.label: tuple(t.run.seed for t in group.trials if t.run.seed not in seeds)
        for group in groups
        if seeds and len(seeds) < len(group.trials)
    }
    measured = [t for group in kept for t in group.trials if t.evaluated]
    meets = True
    if race == "rounds" and measured:
        grid = _by_samples(measured) if axis == "samples" else _by_rounds(measured)
        meets = all(grid[t.path] for t in _lasting(measured))
        if meets:
            kept = [_with(g, [replace(t, compared=grid[t.path]) if t.evaluated else t for t in g.trials]) for g in kept]
    return Ground(groups=tuple(kept), seeds=tuple(sorted(seeds)), left_out=left_out, meets=meets)


def _with(group: Group, trials: Sequence[Trial]) -> Group:
    return replace(group, trials=tuple(trials))


def _lasting(trials: Sequence[Trial]) -> Sequence[Trial]:
    """Return those that did not diverge, if there are any."""
    return [t for t in trials if not t.lost] or trials


def longest_rounds(groups: Sequence[Group]) -> float:
    """Return how many times as many samples a run has processed as another of the same seed in as many rounds."""
    trials = _lasting([t for group in groups for t in group.trials])
    common = min(len(t.history) for t in trials)
    found: dict[int, list[int]] = {}
    for trial in trials:
        found.setdefault(trial.run.seed, []).append(trial.samples[common])
    return max(max(samples) / max(1, min(samples)) for samples in found.values())


def _by_rounds(trials: Sequence[Trial]) -> dict[Path, frozenset[int]]:
    """Return the rounds in which all were evaluated.

    A run that ended by a rule of its own, or in which nobody could train any more, has no say after its end.
    """
    last = {t.path: max(t.evaluated) if t.lost or ended_early(t.run, t.history) else None for t in trials}
    rounds = sorted({r for t in trials for r in t.evaluated})

    def agrees(trial: Trial, number: int) -> bool:
        end = last[trial.path]
        return number in trial.evaluated or (end is not None and number > end)

    common = frozenset(r for r in rounds if all(agrees(t, r) for t in trials))
    return {t.path: common & t.evaluated for t in trials}


def _by_samples(trials: Sequence[Trial]) -> dict[Path, frozenset[int]]:
    """Return for each run the rounds of the evaluations that are nearest to those of the run that has fewest.

    Runs that diverged have no say.
    """
    lasting = _lasting(trials)
    coarsest = min(lasting, key=lambda t: len(t.evaluated))
    points = [coarsest.samples[r] for r in sorted(coarsest.evaluated)]
    gaps = [b - a for a, b in pairwise([0, *points])]
    found: dict[Path, set[int]] = {t.path: set() for t in trials}
    for point, gap in zip(points, gaps, strict=True):
        nearest = {t.path: min(sorted(t.evaluated), key=lambda r: abs(t.samples[r] - point)) for t in trials}
        near = [t for t in trials if abs(t.samples[nearest[t.path]] - point) <= NEAR * gap]
        if all(t in near for t in lasting):
            for t in near:
                found[t.path].add(nearest[t.path])
    return {path: frozenset(rounds) for path, rounds in found.items()}
