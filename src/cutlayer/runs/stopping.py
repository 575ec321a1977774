"""When a run ends, and which of its models is the best: functions of its records, so a resumed run decides the same."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from numbers import Integral
from typing import Any, NamedTuple, Self

from cutlayer.core.checks import is_number
from cutlayer.core.state import Model
from cutlayer.core.tree import storable
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.runs.convergence import accuracies, converged
from cutlayer.runs.metrics import Goal, goal_of

Record = dict[str, Any]
DEAD_ROUNDS = 3  # in a row, in which nobody could train, end a run that samples its clients
SETS = ("validation", "federated", "test")  # whose metrics are monitored by default: the first that there is


class StopTraining(Exception):
    """Raise it in `on_round` to end the training after this round; its message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a run trains: its number of rounds, and what ends it before."""

    rounds: int = 0
    until_converged: bool = False
    until_accuracy: float | None = None  # of the test set
    until_samples: int | None = None  # the round that reaches it is the last
    patience: int | None = None  # evaluations without a gain
    monitor: str | None = None  # what patience and the best model go by; with patience there is a default
    mode: Goal | None = None  # of the monitor; known for the metrics of cutlayer
    min_delta: float = 0.0  # a gain is more than this

    def __post_init__(self) -> None:
        for name, value, least in (
            ("rounds", self.rounds, 0), ("patience", self.patience, 1), ("until_samples", self.until_samples, 1)
        ):  # fmt: skip
            if value is not None and (not isinstance(value, Integral) or value < least):
                raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        if self.until_accuracy is not None and not (is_number(self.until_accuracy) and 0 < self.until_accuracy <= 1):
            raise ConfigError(f"until_accuracy is {self.until_accuracy!r}; it must be a fraction above 0 and up to 1")
        if self.mode not in (None, "max", "min"):
            raise UnknownNameError("mode", str(self.mode), ("max", "min"))
        if not is_number(self.min_delta) or self.min_delta < 0:
            raise ConfigError(f"min_delta is {self.min_delta!r}; it must be a number from 0 up")
        for name, given in (("mode", self.mode is not None), ("min_delta", self.min_delta > 0)):
            if given and self.patience is None and self.monitor is None:
                raise ConfigError(f"{name} is about the monitored metric, but there is none; add monitor or patience")

    @classmethod
    def of(cls, run: object) -> Self:
        """Return the limits among the settings of a run."""
        return cls(**{f.name: getattr(run, f.name) for f in fields(cls)})

    def monitored(self, measured: Collection[str]) -> "Monitor | None":
        """Return what to monitor of the metrics that this run measures, such as test_accuracy."""
        if self.monitor is None and self.patience is None:
            return None
        if not measured:
            raise ConfigError("patience and monitor need samples to evaluate on; give a test or a validation set")
        key = self.monitor or _default(measured)
        if key not in measured:
            raise UnknownNameError("metric", key, measured, "monitor")
        goal = self.mode or goal_of(key)
        if goal is None:
            raise ConfigError(f"monitor {key!r}: say whether it should rise or fall, with mode 'max' or 'min'")
        return Monitor(key, goal)


def _default(measured: Collection[str]) -> str:
    """Return the accuracy or else the loss, of the first set that there is."""
    keys = (f"{of}_{metric}" for of in SETS for metric in ("accuracy", "loss"))
    return next(key for key in keys if key in measured)


class Monitor(NamedTuple):
    """A metric that is watched, and whether it should rise or fall."""

    key: str
    goal: Goal

    def value(self, record: Mapping[str, Any]) -> float:
        """Return its value so that more is better; one that is not finite is the worst."""
        value = record[self.key]
        if value is None:
            return -math.inf
        return float(value if self.goal == "max" else -value)

    def values(self, history: Sequence[Mapping[str, Any]]) -> list[float]:
        return [self.value(record) for record in history if self.key in record]

    def idle(self, history: Sequence[Mapping[str, Any]], min_delta: float) -> int:
        """Return the number of evaluations since the last gain; the first one is a gain."""
        reference, idle = -math.inf, -1
        for value in self.values(history):
            idle += 1
            if idle == 0 or value > reference + min_delta:
                reference, idle = value, 0
        return max(idle, 0)


@storable
class Best(NamedTuple):
    """The model with the best value of the monitored metric, the first of equals."""

    round: int
    value: float  # more is better
    model: Model


def ends(limits: Limits, monitor: Monitor | None, history: Sequence[Record]) -> Iterator[str]:
    """Yield the reasons to stop before the last round."""
    if limits.until_samples is not None and history and history[-1]["samples"] >= limits.until_samples:
        yield f"until_samples {limits.until_samples:,} reached"
    found = accuracies(history)
    if limits.until_accuracy is not None and max(found.values(), default=0.0) >= limits.until_accuracy:
        yield f"until_accuracy {limits.until_accuracy:g} reached"
    if limits.until_converged and converged(found) is not None:
        yield "until_converged: the last evaluations gained next to nothing"
    if limits.patience is not None and monitor and monitor.idle(history, limits.min_delta) >= limits.patience:
        gain = f"no more than {limits.min_delta:g}" if limits.min_delta else "nothing"
        yield f"patience: {monitor.key} has gained {gain} in {limits.patience} evaluations"


def ended_early(run: object, history: Sequence[Record]) -> bool:
    """Return whether one of the limits among the settings of a run has ended it, or it diverged."""
    if history and nobody_trained(history[-1]):
        return True
    limits = Limits.of(run)
    measured = {key for record in history for key in record}
    return any(ends(limits, limits.monitored(measured), history))


def nobody_trained(record: Mapping[str, Any]) -> bool:
    """Return whether no client had a single batch with a finite loss and finite gradients."""
    return record.get("loss", 0.0) is None and record.get("stopped", 0) > 0


def diverged(history: Sequence[Record], *, everyone: bool, last: bool) -> bool:
    """Return whether a run is lost: nobody can train any more.

    That is so if nobody could train in a round that everyone took part in, in three rounds in a row, or in any round.
    """
    dead = len(list(takewhile(nobody_trained, reversed(history))))
    return dead >= (1 if everyone else DEAD_ROUNDS) or bool(last and history and dead == len(history))
