"""An estimate of the convergence bound before any training, from one batch."""

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.calculus import vjp
from cutlayer.core.checks import check_positive
from cutlayer.core.state import Model, Tensors
from cutlayer.errors import ConfigError
from cutlayer.planning import estimate
from cutlayer.planning.problem import LEAST_GAP, Bound
from cutlayer.split import Split
from cutlayer.split.segment import Values


def probe(split: Split, x: Tensor | Tensors, y: Tensor, *, lr: float, key: int = 0) -> Bound:
    """Estimate the bound's constants at the model's current weights from one batch; an odd one loses its last sample.

    The noise comes from the two halves of the batch, the slopes from its gradient, beta from a step with this learning
    rate along that gradient, and the gap is the loss, as if the best one were zero. Neither the model nor torch's
    generators change.
    """
    check_positive("lr", lr)
    inputs = len(tree.tensors(x)[0])
    if inputs != len(y):
        raise ConfigError(f"there are {inputs} inputs for {len(y)} labels; give one label for each input")
    size = len(y) // 2 * 2
    if not size:
        raise ConfigError(f"a batch of {len(y)} cannot be halved, which estimates the noise; give at least 2 samples")
    client, server = split.initial()
    model = client.joined(server)

    def at(values: Values, start: int, stop: int) -> tuple[Tensor, Tensors]:
        return _gradient(split, values, tree.map(lambda a: a[start:stop], x), y[start:stop], key)

    (_, first), (_, second), (loss, whole) = at(model, 0, size // 2), at(model, size // 2, size), at(model, 0, size)
    moved = _stepped(model, whole, lr)
    _, after = at(moved, 0, size)
    units = split.unit_params
    slope = estimate.unit_norms(units, whole)
    variance = estimate.noise(units, first, second, size)
    beta = estimate.smoothness(_distance2(units, after, whole), _distance2(units, moved.params, model.params))
    if not all(bool(a.isfinite().all()) for a in (slope, variance, beta, loss)):
        raise ConfigError(
            f"the gradients of {type(split.model).__name__} are not finite on this batch, or after one step with "
            f"lr {lr:g}; check the samples, or use a smaller lr"
        )
    return Bound(
        beta=float(beta),
        lr=lr,
        noise=variance.double().cpu().numpy(),
        slope=slope.double().cpu().numpy(),
        gap=max(float(loss), LEAST_GAP),
    )


def _gradient(split: Split, values: Values, x: Tensor | Tensors, y: Tensor, key: int) -> tuple[Tensor, Tensors]:
    """Return the loss and the gradients of all trained parameters."""

    def loss_at(part: Values) -> tuple[Tensor, Tensors]:
        out, buffers = split.whole(part, x, key)
        return split.loss(out, y), buffers

    loss, pull = vjp(loss_at, [values], None)
    return loss, pull(torch.ones_like(loss)).params


def _stepped(model: Model, gradients: Tensors, lr: float) -> Model:
    moved = {name: model.params[name] - lr * gradient for name, gradient in gradients.items()}
    return model._replace(params={**model.params, **moved})


def _distance2(units: tuple[tuple[str, ...], ...], a: Tensors, b: Tensors) -> Tensor:
    return estimate.unit_norms(units, {name: value - b[name] for name, value in a.items()}).sum()
