"""The rules of optimisers: gradient rules change the gradients, and one update rule moves a value.

The numbers are those of torch.optim, in its order of operations. A learning rate and a count of steps are plain
numbers, or zero-dimensional tensors, which stay on their device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from cutlayer.core.checks import check, check_decay, check_positive, is_number
from cutlayer.core.state import Grads, Part, Tensors
from cutlayer.errors import ConfigError

Scope = Literal["part", "joint"]
Moments = Sequence[Tensor]
Updated = tuple[Tensor, Moments]
Rate = float | Tensor
Count = int | Tensor


class GradientRule(Protocol):
    """Changes the gradients before the update."""

    @property
    def joint(self) -> bool:
        """Whether the rule reads `grads.norm2`."""

    @property
    def anchored(self) -> bool:
        """Whether the rule reads `part.start`."""

    def __call__(self, part: Part, grads: Grads) -> Grads: ...


class UpdateRule(Protocol):
    """Moves one value along its gradient."""

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments kept for each value."""

    def __call__(self, value: Tensor, gradient: Tensor, moments: Moments, lr: Rate, count: Count) -> Updated:
        """Return the new value and moments of step `count`, which starts at 1."""


def squared_norm(gradients: Tensors) -> Tensor:
    """Return the squared L2 norm over all gradients, in at least single precision."""
    if not gradients:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(g, dtype=accumulator(g.dtype)) for g in gradients.values()]
    return torch.stack(norms).square().sum()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= torch.float32.itemsize else torch.float32


@dataclass(frozen=True)
class WeightDecay:
    """Coupled weight decay: adds the value times the rate to its gradient."""

    rate: float

    joint = False
    anchored = False

    def __post_init__(self) -> None:
        check_decay(self.rate)

    def __call__(self, part: Part, grads: Grads) -> Grads:
        decayed = {name: torch.add(g, part.params[name], alpha=self.rate) for name, g in grads.params.items()}
        return grads._replace(params=decayed)


@dataclass(frozen=True)
class Proximal:
    """FedProx: adds the gradient of μ/2 ‖w − w⁰‖², which pulls each value towards the start of the round."""

    mu: float

    joint = False
    anchored = True

    def __post_init__(self) -> None:
        check(is_number(self.mu) and self.mu >= 0, "proximal", self.mu, "a number of at least 0")

    def __call__(self, part: Part, grads: Grads) -> Grads:
        drawn = {k: torch.add(g, part.params[k] - part.start[k], alpha=self.mu) for k, g in grads.params.items()}
        return grads._replace(params=drawn)


@dataclass(frozen=True)
class Clip:
    """Scales the gradients down to a largest L2 norm, over this part or jointly over all parts of the model."""

    max_norm: float
    scope: Scope = "part"

    anchored = False

    def __post_init__(self) -> None:
        check_positive("clip", self.max_norm)
        check(self.scope in ("part", "joint"), "clip_scope", self.scope, "'part' or 'joint'")

    @property
    def joint(self) -> bool:
        return self.scope == "joint"

    def __call__(self, part: Part, grads: Grads) -> Grads:
        norm2 = grads.norm2 if self.joint else squared_norm(grads.params)
        if norm2 is None:
            raise ConfigError(
                "clip_scope='joint' got no joint gradient norm: this method does not share one across the cut; "
                "use clip_scope='part'."
            )
        factor = torch.clamp(self.max_norm / (norm2.sqrt() + 1e-6), max=1.0)
        return grads._replace(params={name: g * factor.to(g.dtype) for name, g in grads.params.items()})


@dataclass(frozen=True)
class Momentum:
    """Gradient descent with heavy-ball or Nesterov momentum as in PyTorch; with beta 0 it keeps no moment."""

    beta: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check(is_number(self.beta) and 0 <= self.beta < 1, "momentum", self.beta, "a number from 0 up to below 1")
        if self.nesterov and self.beta == 0:
            raise ConfigError("nesterov=True needs a momentum above 0, got 0; set momentum, for example to 0.9.")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum",) if self.beta else ()

    def __call__(self, value: Tensor, gradient: Tensor, moments: Moments, lr: Rate, count: Count) -> Updated:
        if not self.beta:
            return _moved(value, gradient, lr), ()
        momentum = torch.add(gradient, moments[0], alpha=self.beta)
        direction = torch.add(gradient, momentum, alpha=self.beta) if self.nesterov else momentum
        return _moved(value, direction, lr), (momentum,)


@dataclass(frozen=True)
class Adam:
    """Adam with bias correction."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    moments = ("first", "second")

    def __post_init__(self) -> None:
        fits = len(self.betas) == 2 and all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        check(fits, "betas", self.betas, "two numbers from 0 up to below 1")
        check_positive("eps", self.eps)

    def __call__(self, value: Tensor, gradient: Tensor, moments: Moments, lr: Rate, count: Count) -> Updated:
        beta1, beta2 = self.betas
        first = torch.lerp(moments[0], gradient, 1 - beta1)
        second = torch.addcmul(moments[1] * beta2, gradient, gradient, value=1 - beta2)
        steps = count.double() if isinstance(count, Tensor) else count  # betas near 1 need double precision
        divisor = second.sqrt() / _typed((1 - beta2**steps) ** 0.5, second) + self.eps
        return _moved(value, first, lr / (1 - beta1**steps), divisor), (first, second)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay: the decay shrinks the value and does not enter the moments."""

    adam: Adam = Adam()
    weight_decay: float = 0.01

    moments = Adam.moments

    def __post_init__(self) -> None:
        check_decay(self.weight_decay)

    def __call__(self, value: Tensor, gradient: Tensor, moments: Moments, lr: Rate, count: Count) -> Updated:
        return self.adam(value * _typed(1 - lr * self.weight_decay, value), gradient, moments, lr, count)


# Rules that do not depend on the shapes of values, so that all of them may be updated as one flat tensor.
ALIKE = (WeightDecay, Proximal, Clip, Momentum, Adam, AdamW)


def _moved(value: Tensor, direction: Tensor, rate: Rate, divisor: Tensor | None = None) -> Tensor:
    """Return value - rate * direction, or value - rate * direction / divisor."""
    if isinstance(rate, Tensor):
        quotient = direction if divisor is None else direction / divisor
        return torch.addcmul(value, quotient, rate.to(value.dtype), value=-1)
    if divisor is None:
        return torch.add(value, direction, alpha=-rate)
    return torch.addcdiv(value, direction, divisor, value=-rate)


def _typed(number: Rate, like: Tensor) -> Rate:
    """Return the number, if a tensor in the type of the other: a zero-dimensional value would take on its type."""
    return number.to(like.dtype) if isinstance(number, Tensor) else number
