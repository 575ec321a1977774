"""Differences between runs, seed by seed."""

from statistics import fmean, stdev
from typing import NamedTuple

from cutlayer.results.trials import Group

LEVEL = 0.95  # of the intervals


class Difference(NamedTuple):
    """The mean of a difference over common seeds, and half of its 95 % interval, which one seed does not have."""

    mean: float
    half: float | None
    seeds: int

    @property
    def interval(self) -> tuple[float, float] | None:
        return None if self.half is None else (self.mean - self.half, self.mean + self.half)

    @property
    def is_certain(self) -> bool:
        """Whether 0 is outside of the interval."""
        return self.half is not None and abs(self.mean) > self.half


def above(ours: Group, theirs: Group) -> Difference | None:
    """Return by how much our best value is above theirs, over the seeds that both have."""
    bests = {trial.run.seed: trial.best for trial in theirs.trials}
    pairs = [(trial.best, bests.get(trial.run.seed)) for trial in ours.trials]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    if not found:
        return None
    half = None if len(found) == 1 else _t(len(found) - 1) * stdev(found) / len(found) ** 0.5
    return Difference(fmean(found), half, len(found))


def _t(freedom: int) -> float:
    """Return the quantile of Student's t that leaves 2.5 % above it."""
    from scipy.special import stdtrit  # here because it is slow to load

    return float(stdtrit(freedom, (1 + LEVEL) / 2))
