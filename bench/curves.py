"""What is measured of learning curves: means over windows and over seeds, and where a mean curve arrives.

Single rounds of uneven clients scatter by several points, so that a best round, or one seed, says little. A window is
one of rounds or, for runs that end by samples, one of processed samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from scipy.stats import t

from cutlayer.results.trials import Group, Spread, Trial

Axis = Literal["rounds", "samples"]
Curve = Mapping[int, float]  # accuracy in per cent by round

MOST_WINDOWS = 6
SMOOTHED = 10  # rounds that a smoothed curve averages
STEPS = (1, 2, 3, 5)  # and ten times as many, and so on: lengths of windows
FEWEST_SEEDS = 2  # from which on runs are compared


class Window(NamedTuple):
    """Rounds, or samples, from the first to the last."""

    first: int
    last: int
    axis: Axis = "rounds"

    def __str__(self) -> str:
        numbers = [self.first, self.last] if self.first < self.last else [self.last]
        return f"{self.axis} {'–'.join(f'{number:,}' for number in numbers)}"


class Level(NamedTuple):
    """The accuracy of some runs in a window, or by how much it differs from that of others."""

    over_seeds: Spread
    rounds_scatter: float | None  # standard deviation of single rounds of one seed, the mean over seeds
    seeds: int

    def is_significant(self, tests: int) -> bool:
        """Whether 0 is outside of the 95 % interval of Student's t, where so many tests share the 5 % (Bonferroni)."""
        mean, deviation = self.over_seeds.mean, self.over_seeds.std
        if deviation is None:
            return False
        half = t.ppf(1 - 0.025 / tests, self.seeds - 1) * deviation / self.seeds**0.5
        return bool(abs(mean) > half)


def windows(length: int, axis: Axis = "rounds") -> list[Window]:
    """As many equal windows as fit into so many rounds or samples, six at most; a rest is left out."""
    sizes = (step * 10**power for power in range(12) for step in STEPS)
    size = next(size for size in sizes if length <= MOST_WINDOWS * size)
    return [Window(end - size + 1, end, axis) for end in range(size, length + 1, size)]


def common_windows(groups: Iterable[Group], axis: Axis = "rounds") -> list[Window]:
    """The windows of what the second longest seed of a run has, or its only one, of the run that has most."""
    lengths = [sorted(length(trial, axis) for trial in group.trials)[-FEWEST_SEEDS:] for group in groups]
    return windows(max(two[0] for two in lengths), axis)


def length(trial: Trial, axis: Axis = "rounds") -> int:
    """How far a run has come."""
    return len(trial.history) if axis == "rounds" else trial.history[-1]["samples"]


def inside(trial: Trial, window: Window) -> list[float]:
    """The accuracies measured in a window; none unless the run has come to its end."""
    if length(trial, window.axis) < window.last:
        return []
    places = trial.samples if window.axis == "samples" else {number: number for number in trial.values}
    return [100 * a for number, a in trial.values.items() if window.first <= places[number] <= window.last]


def level(group: Group, window: Window) -> Level | None:
    """Of the seeds that have come to the end of the window."""
    found = [values for trial in group.trials if (values := inside(trial, window))]
    over_seeds = Spread.of(fmean(values) for values in found)
    if over_seeds is None:
        return None
    scatters = [stdev(values) for values in found if len(values) > 1]
    return Level(over_seeds, fmean(scatters) if scatters else None, len(found))


def pairs(group: Group, base: Group) -> list[tuple[Trial, Trial]]:
    """The runs of both by the seeds that they have in common."""
    bases = {trial.run.seed: trial for trial in base.trials}
    return [(trial, bases[trial.run.seed]) for trial in group.trials if trial.run.seed in bases]


def gain(group: Group, base: Group, window: Window) -> Level | None:
    """Points above the base, seed by seed; none unless two seeds have both runs in this window."""
    found = [(inside(ours, window), inside(theirs, window)) for ours, theirs in pairs(group, base)]
    differences = [fmean(ours) - fmean(theirs) for ours, theirs in found if ours and theirs]
    over_seeds = Spread.of(differences)
    if over_seeds is None or len(differences) < FEWEST_SEEDS:
        return None
    return Level(over_seeds, None, len(differences))


def mean_curve(trials: Sequence[Trial], least: int = 1) -> Curve:
    """The mean over the seeds that measured a round, in rounds that at least so many measured."""
    numbers = sorted({number for trial in trials for number in trial.values})
    found = {n: [100 * trial.values[n] for trial in trials if n in trial.values] for n in numbers}
    return {number: fmean(values) for number, values in found.items() if len(values) >= least}


def smoothed(points: Curve) -> Curve:
    """The mean of each round and those before it, ten in all; the first rounds have none."""
    numbers = sorted(points)
    return {
        numbers[end - 1]: fmean(points[number] for number in numbers[end - SMOOTHED : end])
        for end in range(SMOOTHED, len(numbers) + 1)
    }


def arrival(points: Curve, target: float) -> int | None:
    """The first round whose accuracy is the target's, in per cent."""
    return next((number for number in sorted(points) if points[number] >= target), None)


def speed_up(group: Group, base: Group, target: float) -> float | None:
    """How many times fewer rounds to a target, by smoothed mean curves over shared seeds; none unless these are two."""
    both = pairs(group, base)
    sides = [ours for ours, _ in both], [theirs for _, theirs in both]
    ours, theirs = (arrival(smoothed(mean_curve(trials, FEWEST_SEEDS)), target) for trials in sides)
    return None if ours is None or theirs is None else theirs / ours
