"""The rule at the end of a round: the old model and the clients' mean give the new model, at the model's place."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from cutlayer.core.checks import check, check_positive, is_number
from cutlayer.core.state import Model, Tensors


class Outcome(NamedTuple):
    """The memory and the model after a round."""

    memory: Tensors
    model: Model


class Outer(Protocol):
    """A rule with a memory for each half of the model."""

    def start(self, model: Model) -> Tensors:
        """Return the memory before the first round."""

    def __call__(self, memory: Tensors, old: Model, mean: Model, lr: float) -> Outcome:
        """Return the memory and the model after a round at this learning rate."""


@dataclass(frozen=True)
class Replace:
    """The mean becomes the new model."""

    def start(self, model: Model) -> Tensors:
        return {}

    def __call__(self, memory: Tensors, old: Model, mean: Model, lr: float) -> Outcome:
        return Outcome(memory, mean)


class _WithMomentum:
    """A rule whose memory starts as zeros."""

    def start(self, model: Model) -> Tensors:
        return {k: torch.zeros_like(v) for k, v in model.params.items()}


@dataclass(frozen=True)
class HeavyBall(_WithMomentum):
    """FedAvgM: a round is a step with momentum, `m ← β m + (w − w̄); w ← w − m`; buffers are replaced."""

    beta: float

    def __post_init__(self) -> None:
        check_beta(self.beta)

    def __call__(self, memory: Tensors, old: Model, mean: Model, lr: float) -> Outcome:
        memory = {k: self.beta * m + (old.params[k] - mean.params[k]) for k, m in memory.items()}
        return Outcome(memory, mean._replace(params={k: old.params[k] - m for k, m in memory.items()}))


@dataclass(frozen=True)
class SlowMo(_WithMomentum):
    """Momentum in units of the learning rate η: `u ← β u + (w − w̄)/η; w ← w − α η u`; buffers are replaced."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        check_beta(self.beta)

    def __call__(self, memory: Tensors, old: Model, mean: Model, lr: float) -> Outcome:
        if not lr:  # the schedule has reached zero, so nothing has moved
            return Outcome(memory, mean)
        memory = {k: self.beta * u + (old.params[k] - mean.params[k]) / lr for k, u in memory.items()}
        params = {k: old.params[k] - self.alpha * lr * u for k, u in memory.items()}
        return Outcome(memory, mean._replace(params=params))


def check_beta(beta: float) -> None:
    check(is_number(beta) and 0 <= beta < 1, "beta", beta, "a number from 0 up to below 1")
