"""What is measured of learning curves: means over windows of rounds and over seeds, and where a mean curve arrives.

Single rounds of uneven clients scatter by several points, so that a best round, or one seed, says little.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from cutlayer.trials import Group, Spread, Trial

Curve = Mapping[int, float]  # accuracy in per cent by round

MOST_WINDOWS = 6
SMOOTHED = 10  # rounds that a smoothed curve averages
STEPS = (1, 2, 5)  # and ten times as many, and so on: lengths of windows


class Window(NamedTuple):
    """Rounds from the first to the last."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}–{self.last}" if self.first < self.last else str(self.last)


class Level(NamedTuple):
    """The accuracy of a group in a window."""

    over_seeds: Spread
    rounds_scatter: float | None  # standard deviation of single rounds of one seed, the mean over seeds
    seeds: int


def windows(rounds: int) -> list[Window]:
    """As many windows of equal length as fit into so many rounds, six at most; a rest is left out."""
    lengths = (step * 10**power for power in range(10) for step in STEPS)
    length = next(length for length in lengths if rounds <= MOST_WINDOWS * length)
    return [Window(end - length + 1, end) for end in range(length, rounds + 1, length)]


def curve(trial: Trial) -> Curve:
    return {number: 100 * accuracy for number, accuracy in trial.accuracies.items()}


def inside(trial: Trial, window: Window) -> list[float]:
    """The accuracies measured in a window; none unless the run has all of its rounds."""
    if len(trial.history) < window.last:
        return []
    return [accuracy for number, accuracy in curve(trial).items() if window.first <= number <= window.last]


def level(group: Group, window: Window) -> Level | None:
    """Of the seeds that have all rounds of the window."""
    found = [values for trial in group.trials if (values := inside(trial, window))]
    over_seeds = Spread.of(fmean(values) for values in found)
    if over_seeds is None:
        return None
    scatters = [stdev(values) for values in found if len(values) > 1]
    return Level(over_seeds, fmean(scatters) if scatters else None, len(found))


def gain(group: Group, base: Group, window: Window) -> Level | None:
    """Points above the base, seed by seed, of the seeds that both have; none unless these are two at least."""
    bases = {trial.run.seed: values for trial in base.trials if (values := inside(trial, window))}
    pairs = [(inside(trial, window), bases[trial.run.seed]) for trial in group.trials if trial.run.seed in bases]
    differences = [fmean(ours) - fmean(theirs) for ours, theirs in pairs if ours]
    over_seeds = Spread.of(differences)
    return Level(over_seeds, None, len(differences)) if over_seeds is not None and len(differences) > 1 else None


def last_gain(group: Group, base: Group, among: Sequence[Window]) -> tuple[Window, Level] | None:
    """The gain in the last window that has one."""
    found = ((window, gain(group, base, window)) for window in reversed(among))
    return next(((window, points) for window, points in found if points is not None), None)


def mean_curve(group: Group) -> Curve:
    """The mean over seeds, in the rounds that all of them measured."""
    curves = [curve(trial) for trial in group.trials]
    common = sorted(set.intersection(*(set(one) for one in curves)))
    return {number: fmean(one[number] for one in curves) for number in common}


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
