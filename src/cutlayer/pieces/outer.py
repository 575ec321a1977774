"""What ends a round: the old model and the clients' mean give the new model, at the model's own place."""

from dataclasses import dataclass
from typing import Protocol

import torch

from cutlayer import tree
from cutlayer.state import Model, Tensors


class Outer(Protocol):
    """A rule with a memory of its own for each half of the model."""

    def start(self, model: Model) -> Tensors:
        """The memory before the first round."""
        ...

    def __call__(self, memory: Tensors, old: Model, mean: Model) -> tuple[Tensors, Model]:
        """The memory and the model after a round."""
        ...


@dataclass(frozen=True)
class Replace:
    """The mean is the new model."""

    def start(self, model: Model) -> Tensors:
        return {}

    def __call__(self, memory: Tensors, old: Model, mean: Model) -> tuple[Tensors, Model]:
        return memory, mean


@dataclass(frozen=True)
class HeavyBall:
    """FedAvgM: the round's move is a step with momentum, `m ← β m + (w − w̄); w ← w − m`; buffers are replaced."""

    beta: float

    def start(self, model: Model) -> Tensors:
        return tree.map(torch.zeros_like, model.params)  # type: ignore[no-any-return]

    def __call__(self, memory: Tensors, old: Model, mean: Model) -> tuple[Tensors, Model]:
        memory = {k: self.beta * m + (old.params[k] - mean.params[k]) for k, m in memory.items()}
        return memory, mean._replace(params={k: old.params[k] - m for k, m in memory.items()})
