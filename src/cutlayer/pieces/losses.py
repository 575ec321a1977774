"""Losses by name: the mean over a batch, from the outputs of the model and the targets."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from cutlayer import registry
from cutlayer.errors import ConfigError
from cutlayer.split.losses import cross_entropy, next_token

Loss = Callable[[Tensor, Tensor], Tensor]


def mse(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return F.mse_loss(_fitting(out, y), y)


def mae(out: Tensor, y: Tensor) -> Tensor:
    """Mean absolute error."""
    return F.l1_loss(_fitting(out, y), y)


def huber(out: Tensor, y: Tensor) -> Tensor:
    """Squared for errors below 1 and linear above."""
    return F.huber_loss(_fitting(out, y), y)


def bce(out: Tensor, y: Tensor) -> Tensor:
    """Binary cross entropy of one score for each target, which is 0 or 1."""
    return F.binary_cross_entropy_with_logits(_fitting(out, y), y.to(out.dtype))


def _fitting(out: Tensor, y: Tensor) -> Tensor:
    """Return the outputs in the shape of the targets; torch would broadcast (n, 1) and (n,) to (n, n)."""
    if out.dim() == y.dim() + 1 and out.shape[-1] == 1:
        out = out.squeeze(-1)
    if out.shape != y.shape:
        raise ConfigError(
            f"the outputs have the shape {tuple(out.shape[1:])} and the targets {tuple(y.shape[1:])}; give the model "
            "one output for each target"
        )
    return out


LOSSES: registry.Table[Loss] = registry.table(
    "LOSSES",
    {"cross_entropy": cross_entropy, "next_token": next_token, "mse": mse, "mae": mae, "huber": huber, "bce": bce},
)


def usual_loss(y: Tensor) -> str:
    """Return the loss that fits these targets."""
    return "mse" if y.is_floating_point() else "cross_entropy"


def num_outputs(loss: str, y: Tensor, num_classes: int | None) -> int | None:
    """Return how many outputs a model needs; None if the targets do not tell."""
    if loss == "bce" and num_classes == 2:
        return 1
    return y[:1].numel() if y.is_floating_point() else num_classes


def usual_metrics(loss: str, y: Tensor) -> tuple[str, ...] | None:
    """Return the names of the metrics that fit a loss; None for those of a classification."""
    if loss == "bce":
        return ("accuracy",)
    return ("mae", "rmse", "r2") if y.is_floating_point() else None
