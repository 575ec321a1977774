"""What runs are compared by: a metric of their records, its direction, and how it is printed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.runs.metrics import SHARES, Goal, goal_of

SETS = ("test", "validation", "federated")  # whose metrics are compared by default: the first that all runs have
PRINTED = {"f1": "F1", "auc": "AUC", "mae": "MAE", "mse": "MSE", "rmse": "RMSE", "r2": "R²"}
TRAINING_LOSS = "training_loss"  # is called loss in the records, and loss here is that of the test set
SIGNIFICANT = 4  # digits of a value that is no share

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Measure:
    """A metric by its key in the records, and whether it should rise or fall."""

    key: str
    goal: Goal

    @property
    def name(self) -> str:
        """Its name for `compare --metric`."""
        return _name(self.key)

    @property
    def full(self) -> str:
        """In words, with the set that it was measured on: test accuracy, validation RMSE."""
        of, _, metric = (TRAINING_LOSS if self.key == "loss" else self.key).partition("_")
        return " ".join([of, *(PRINTED.get(word, word) for word in metric.split("_"))])

    @property
    def words(self) -> str:
        """In words; the test set goes without saying, except for the loss, which training has as well."""
        return self.full if self.key == "test_loss" else self.full.removeprefix("test ")

    @property
    def head(self) -> str:
        """The words above a column, with the unit, or an arrow if less is better."""
        return self.words.replace(" ", "\n") + (" %" if self.is_share else "") + (" ↓" if self.goal == "min" else "")

    def with_unit(self, words: str) -> str:
        """Return the words beside an axis."""
        return f"{words} (%)" if self.is_share else words

    @property
    def is_share(self) -> bool:
        """Whether it is printed in per cent."""
        return self.key.partition("_")[2].removesuffix("_worst").removesuffix("_std") in SHARES

    @property
    def scale(self) -> float:
        """What a value is multiplied with in print."""
        return 100.0 if self.is_share else 1.0

    def told(self, value: float) -> str:
        """Return a single value in print, with its unit."""
        return f"{100 * value:.1f} %" if self.is_share else f"{value:.{self.digits(value)}f}"

    def digits(self, value: float | None) -> int:
        """Return the decimals of a value, or of a column with this best value."""
        if self.is_share:
            return 1
        return max(0, SIGNIFICANT - 1 - (math.floor(math.log10(abs(value))) if value else 0))

    def rank(self, value: float | None) -> float:
        """Return a number that is higher the better a value is; nothing is worse than none."""
        if value is None:
            return -math.inf
        return value if self.goal == "max" else -value

    def best(self, values: Iterable[float]) -> float | None:
        return max(values, key=self.rank, default=None)

    def reaches(self, value: float, target: float) -> bool:
        return self.rank(value) >= self.rank(target)

    def share_of(self, share: float, best: float) -> float:
        """Return a target that a share of the best value reaches: below it, or above it if less is better."""
        return share * best if (self.goal == "max") == (best >= 0) else best / share

    def check_target(self, target: float) -> None:
        """Refuse a target that no value can reach, or that all do."""
        if self.is_share and not 0 <= target <= 1:
            raise ConfigError(f"--target is {target:g}; for {self.words} it must be a fraction from 0 to 1")


ACCURACY = Measure("test_accuracy", "max")


def default(runs: Sequence[Sequence[Record]], metrics: Sequence[str] = ()) -> Measure:
    """Return what to compare runs by: the test accuracy if a run has it, else the first metric that all of them have.

    The first is sought on the test set, on the validation set, and on the clients' own; on each, the accuracy is
    first, the metrics follow in the order in which they were listed, and the loss is last. `metrics` are the names of
    those that a run will measure; they decide while nothing is measured yet.
    """
    keys = [measured(history) for history in runs]
    if any(ACCURACY.key in some for some in keys):
        return ACCURACY
    shared = [key for key in keys[0] if all(key in some for some in keys)] if keys else []
    found = [Measure(key, goal) for key in shared or [f"test_{m}" for m in metrics] if (goal := goal_of(key))]
    return min((m for m in found if m.key != "loss"), key=_place, default=ACCURACY)


def _place(measure: Measure) -> tuple[int, int]:
    of, _, metric = measure.key.partition("_")
    return SETS.index(of), {"accuracy": 0, "loss": 2}.get(metric, 1)


def named(name: str, histories: Iterable[Sequence[Record]], goal: Goal | None = None) -> Measure:
    """Return the measure of this name, which some of the runs must have; a goal is needed if it is not known."""
    known = {_name(key): key for history in histories for key in measured(history)}
    key = known.get(name.removeprefix("test_"))
    if key is None:
        raise UnknownNameError("metric", name, known, "these runs")
    goal = goal or goal_of(key)
    if goal is None:
        raise ConfigError(f"--metric {name}: say whether it should rise or fall, with --mode max or min")
    return Measure(key, goal)


def measured(history: Sequence[Record]) -> list[str]:
    """Return the keys of the records that runs can be compared by: numbers that were measured on a set, and the loss.

    A number that is not finite is None in a record.
    """
    keys = dict.fromkeys(key for record in history for key, v in record.items() if v is None or _is_number(v))
    return [key for key in keys if key == "loss" or key.partition("_")[0] in SETS]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _name(key: str) -> str:
    return TRAINING_LOSS if key == "loss" else key.removeprefix("test_")
