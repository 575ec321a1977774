"""Learning rates round by round, lower-case so that they print as they are written: `cosine(lr=0.1, rounds=50)`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlayer import registry
from cutlayer.core.checks import check_positive

Schedule = Callable[[int], float]


@dataclass(frozen=True)
class constant:
    """The same learning rate in every round."""

    lr: float

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)

    def __call__(self, round: int) -> float:
        return self.lr


@dataclass(frozen=True)
class exponential:
    """A learning rate that is multiplied by `decay` after every round."""

    lr: float
    decay: float = 0.998

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_positive("decay", self.decay)

    def __call__(self, round: int) -> float:
        return self.lr * self.decay**round


@dataclass(frozen=True)
class cosine:
    """A learning rate that falls along half a cosine to 0 in `rounds` rounds, and stays there."""

    lr: float
    rounds: int

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_positive("rounds", self.rounds)

    def __call__(self, round: int) -> float:
        return self.lr * (1 + math.cos(math.pi * min(round / self.rounds, 1.0))) / 2


@dataclass(frozen=True)
class steps:
    """A learning rate that is multiplied by `factor` at each milestone."""

    lr: float
    milestones: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_positive("factor", self.factor)

    def __call__(self, round: int) -> float:
        return self.lr * self.factor ** sum(round >= milestone for milestone in self.milestones)


@dataclass(frozen=True)
class warmup:
    """Another schedule, scaled up linearly from 1/rounds to 1 in its first `rounds` rounds."""

    schedule: Schedule
    rounds: int

    def __post_init__(self) -> None:
        check_positive("rounds", self.rounds)

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
