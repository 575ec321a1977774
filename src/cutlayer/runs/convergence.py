"""When a run has converged: when further evaluations gain next to nothing (HASFL, section VII-B)."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

PATIENCE = 5  # evaluations
LEAST_GAIN = 0.0002  # of the best accuracy in as many evaluations: 0.02 percentage points
DIGITS = 9  # differences of accuracies are exact to so many


class Converged(NamedTuple):
    """Where a run had converged, and how good it was."""

    round: int
    accuracy: float  # the best until then


def accuracies(history: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Test accuracy by round, where it was measured."""
    return {r["round"]: r["test_accuracy"] for r in history if r.get("test_accuracy") is not None}


def converged(found: Mapping[int, float]) -> Converged | None:
    """The first evaluation after which five more raise the best accuracy by less than 0.02 percentage points in all.

    `found`: accuracies by round, in order. None while no evaluation has five such successors.
    """
    best = list(accumulate(found.values(), max))
    for number, now, later in zip(found, best, best[PATIENCE:], strict=False):
        if round(later - now, DIGITS) < LEAST_GAIN:
            return Converged(number, now)
    return None
