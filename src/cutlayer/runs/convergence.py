"""The test of convergence: further evaluations gain next to nothing (HASFL, section VII-B)."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

PATIENCE = 5  # evaluations
LEAST_GAIN = 0.0002  # of the best accuracy within PATIENCE evaluations: 0.02 percentage points
DIGITS = 9  # to which differences of accuracies are rounded


class Converged(NamedTuple):
    """The round at which a run had converged, and its accuracy."""

    round: int
    accuracy: float  # the best up to this round


def accuracies(history: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the test accuracy by round, where it was measured."""
    return {r["round"]: r["test_accuracy"] for r in history if r.get("test_accuracy") is not None}


def converged(found: Mapping[int, float]) -> Converged | None:
    """Return the first evaluation after which five more raise the best accuracy by less than 0.02 percentage points.

    `found`: accuracies by round, in order. None if there is no such evaluation yet.
    """
    best = list(accumulate(found.values(), max))
    for number, now, later in zip(found, best, best[PATIENCE:], strict=False):
        if round(later - now, DIGITS) < LEAST_GAIN:
            return Converged(number, now)
    return None
