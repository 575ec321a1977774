"""Learning-rate schedules, in lower case so that they print as they are written: `cosine(lr=0.1, rounds=50)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlayer import registry
from cutlayer.core.checks import check_positive

Schedule = Callable[[int], float]


class _Checked:
    """A schedule that checks that its numbers are above 0."""

    def __post_init__(self) -> None:
        for name in ("lr", "decay", "rounds", "factor"):
            if name in vars(self):
                check_positive(name, vars(self)[name])


@dataclass(frozen=True)
class constant(_Checked):
    """The same learning rate in every round."""

    lr: float

    def __call__(self, round: int) -> float:
        return self.lr


@dataclass(frozen=True)
class exponential(_Checked):
    """A learning rate that is multiplied by `decay` after every round."""

    lr: float
    decay: float = 0.998

    def __call__(self, round: int) -> float:
        return self.lr * self.decay**round


@dataclass(frozen=True)
class cosine(_Checked):
    """A learning rate that falls along half a cosine to 0 in `rounds` rounds and stays there."""

    lr: float
    rounds: int

    def __call__(self, round: int) -> float:
        return self.lr * (1 + math.cos(math.pi * min(round / self.rounds, 1.0))) / 2


@dataclass(frozen=True)
class steps(_Checked):
    """A learning rate that is multiplied by `factor` at each milestone."""

    lr: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def __call__(self, round: int) -> float:
        return self.lr * self.factor ** sum(round >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class warmup(_Checked):
    """Another schedule, scaled up linearly from 1/rounds to 1 in its first `rounds` rounds."""

    schedule: Schedule
    rounds: int

    def __call__(self, round: int) -> float:
        return self.schedule(round) * min((round + 1) / self.rounds, 1.0)


SCHEDULES: registry.Table[Callable[..., Any]] = registry.table(
    "SCHEDULES",
    {
        "constant": constant,
        "exponential": exponential,
        "cosine": cosine,
        "steps": steps,
    },
)
