"""Metrics: functions of outputs and targets, per sample or over the whole set, and the names that run files use.

A metric that returns one number a sample is averaged. One that returns a single number, such as F1, is called once with
the outputs and targets of the whole set: the mean of its values on parts of the set would be another number. An object
with `reset`, `update` and `compute`, as torchmetrics makes them, is fed batch by batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from cutlayer import registry
from cutlayer.data.arrays import IGNORED
from cutlayer.errors import ConfigError
from cutlayer.split.losses import by_class

Function = Callable[[Any, Tensor], Any]  # (outputs, targets) -> a number a sample, or one number
Goal = Literal["max", "min"]


@runtime_checkable
class Accumulating(Protocol):
    """A metric that sees one batch after another, as those of torchmetrics."""

    def reset(self) -> None: ...

    def update(self, out: Any, y: Tensor, /) -> None: ...

    def compute(self) -> Any: ...


@runtime_checkable
class Movable(Protocol):
    """A metric that has tensors on a device, as those of torchmetrics."""

    def to(self, device: torch.device, /) -> Any: ...


Metric = Function | Accumulating
MULTILABEL = {"f1": "MultilabelF1Score", "auc": "MultilabelAUROC"}  # what torchmetrics has for several labels
Metrics = Mapping[str, Metric] | Sequence[str] | None


def accuracy(out: Tensor, y: Tensor) -> Tensor:
    """Top-1: whether each sample's largest output is its class; of binary scores, whether their signs are right.

    It is NaN where the target is ignored, and `evaluate` leaves that out.
    """
    scores, out = binary(out, y), by_class(out, y)
    hits = (out.argmax(1) == y if scores is None else (scores > 0) == (y > 0.5)).double()
    hits = hits.masked_fill(ignored(y), math.nan)
    return hits if scores is None else hits.reshape(len(y), -1).mean(1)


def f1(out: Tensor, y: Tensor) -> Tensor:
    """Macro F1: the mean of the classes' F1 scores, over all classes that occur or were predicted."""
    scores, out = _one_label(out, y, "f1"), by_class(out, y)
    guess, truth = (out.argmax(1), y) if scores is None else ((scores > 0).long(), (y > 0.5).long())
    known = ~ignored(y)
    guess, truth = guess[known], truth[known]
    classes = 1 + max(int(a.max()) if len(a) else 0 for a in (guess, truth))
    guesses, truths = (torch.nn.functional.one_hot(a, classes).double() for a in (guess, truth))
    both = guesses.sum(0) + truths.sum(0)
    return (2 * (guesses * truths).sum(0) / both)[both > 0].mean()


def auc(out: Tensor, y: Tensor) -> Tensor:
    """Area under the ROC curve: of two classes, or the mean over each class against the rest; ties count half."""
    one, known = _one_label(out, y, "auc"), ~ignored(y)
    out = by_class(out, y)
    if one is not None:
        return _area(one[known], y[known] > 0.5)
    scores, truth = out.double().softmax(1).movedim(1, -1)[known], y[known]
    if scores.shape[1] == 2:
        return _area(scores[:, 1], truth == 1)
    areas = torch.stack([_area(scores[:, k], truth == k) for k in range(scores.shape[1])])
    return areas[areas.isfinite()].mean()  # a class that nobody, or everybody, belongs to has no area


def ignored(y: Tensor) -> Tensor:
    """Return which targets are ignored; a real number never is."""
    return torch.zeros_like(y, dtype=torch.bool) if y.is_floating_point() else y == IGNORED


def binary(out: Any, y: Tensor) -> Tensor | None:
    """Return one score for each target, in the shape of the targets; None if there is a score for each class."""
    out = _tensor(out)
    shapes = (y.shape, (*y.shape, 1), (len(y), 1, *y.shape[1:]))
    return out.reshape(y.shape) if out.shape in shapes else None


def _one_label(out: Any, y: Tensor, name: str) -> Tensor | None:
    """Return binary scores, or None, as above; refuse several labels a sample."""
    scores = binary(out, y)
    if scores is not None and y.dim() == 2 and y.shape[1] > 1:
        raise ConfigError(
            f"{name} is for one class a sample, and the targets are {y.shape[1]} labels a sample; take accuracy, or "
            f"give a metric of your own, such as metrics={{{name!r}: torchmetrics.classification.{MULTILABEL[name]}"
            f"(num_labels={y.shape[1]})}}"
        )
    return scores


def _tensor(out: Any) -> Tensor:
    """Return the output of a model if it is one tensor; these metrics cannot know which of several counts."""
    if not isinstance(out, Tensor):
        first = repr(next(iter(out))) if isinstance(out, Mapping) else "0"
        raise ConfigError(
            f"the model's output is a {type(out).__name__}, and this metric reads one tensor; say which, such as "
            f"metrics={{'accuracy': lambda out, y: cutlayer.accuracy(out[{first}], y)}}"
        )
    return out


def _area(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the share of pairs of a positive and a negative that the scores order rightly."""
    place, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)[1:]
    ranks: Tensor = (counts.cumsum(0) - (counts - 1) / 2)[place]  # the mean rank among equals
    num = positive.double().sum()
    return (ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(scores) - num))


def mae(out: Tensor, y: Tensor) -> Tensor:
    """Mean absolute error."""
    return _errors(out, y).abs()


def mse(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return _errors(out, y) ** 2


def rmse(out: Tensor, y: Tensor) -> Tensor:
    """Root of the mean squared error."""
    return mse(out, y).mean().sqrt()


def r2(out: Tensor, y: Tensor) -> Tensor:
    """Coefficient of determination; of several targets, the mean."""
    errors = _errors(out, y).flatten(1)
    truth = y.double().reshape(errors.shape)
    return (1 - (errors**2).sum(0) / ((truth - truth.mean(0)) ** 2).sum(0)).mean()


def _errors(out: Tensor, y: Tensor) -> Tensor:
    """Return outputs minus targets, in rows of samples; (n, 1) and (n,) are the same shape here."""
    if _tensor(out).numel() != y.numel():
        raise ConfigError(
            f"the outputs have the shape {tuple(out.shape)} and the targets {tuple(y.shape)}; a regression needs an "
            "output for each target"
        )
    return (out.double().reshape(y.shape) - y.double()).reshape(len(y), -1)


METRICS: registry.Table[Function] = registry.table(
    "METRICS", {"accuracy": accuracy, "f1": f1, "auc": auc, "mae": mae, "mse": mse, "rmse": rmse, "r2": r2}
)
GOALS: dict[str, Goal] = {
    "loss": "min", "accuracy": "max", "f1": "max", "auc": "max",
    "mae": "min", "mse": "min", "rmse": "min", "r2": "max",
}  # fmt: skip
SHARES = ("accuracy", "f1", "auc")  # from 0 to 1, printed in per cent


def goal_of(key: str) -> Goal | None:
    """Return whether a value of a run's records, such as test_accuracy, should rise or fall; None if it is unknown."""
    return GOALS.get("loss" if key == "loss" else key.partition("_")[2].removesuffix("_worst"))


def by_name(metrics: Metrics, num_classes: int | None) -> dict[str, Metric]:
    """Return metrics by name; by default the accuracy of a classification, and nothing but the loss otherwise."""
    if metrics is None:
        return {"accuracy": accuracy} if num_classes is not None else {}
    if isinstance(metrics, Mapping):
        for name, metric in metrics.items():
            if name == "loss":
                raise ConfigError("a metric cannot be called 'loss', which is the loss of the split; rename it")
            if isinstance(metric, type):
                raise ConfigError(
                    f"the metric {name!r} is the class {metric.__name__}; give an object of it, such as "
                    f"{metric.__name__}(...)"
                )
            if not (callable(metric) or isinstance(metric, Accumulating)):
                raise ConfigError(f"the metric {name!r} is {metric!r}; give a function of (outputs, targets)")
        return dict(metrics)
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigError(f"metrics is {metrics!r}; give names, such as ['accuracy', 'f1'], or a dict of functions")
    return {name: registry.find("metric", METRICS, name) for name in metrics}
