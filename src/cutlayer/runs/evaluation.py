"""Evaluation of a model: its loss and its metrics on a set of samples, in batches that fit the memory."""

import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.state import Model
from cutlayer.data.arrays import Arrays
from cutlayer.engines.out_of_memory import out_of_memory, release
from cutlayer.errors import ConfigError
from cutlayer.runs.metrics import Accumulating, Function, Metric, Movable, binary, ignored
from cutlayer.split import Split
from cutlayer.split.losses import following, next_token
from cutlayer.split.rehearsal import broadcasting, broadcasts

log = logging.getLogger("cutlayer")


@torch.no_grad()
def evaluate(
    split: Split, model: Model, data: Arrays, metrics: Mapping[str, Metric], targets: int | None = None
) -> dict[str, float]:
    """Return the mean loss and each metric over all samples, in eval mode, without changing the model.

    A metric is a function of outputs and targets. If it returns a number for each sample, their mean is taken; if it
    returns a single number (F1, AUC), it is called once with the outputs and targets of all samples, which are then
    collected on the CPU. It may also be an object with `reset`, `update` and `compute`, as in torchmetrics.

    A batch holds at most `targets` targets, by default 512, or 4096 on a GPU; a text has a target at every position,
    each with scores for a whole vocabulary. On out-of-memory, the batch is halved until it fits.
    """
    if targets is None:
        targets = 4096 if data.y.is_cuda else 512
    batch = max(1, min(len(data), targets // max(1, data.y[:1].numel())))
    while True:
        try:
            return measured(_predicted(split, model, data, batch), {"loss": split.loss, **metrics})
        except RuntimeError as error:
            if batch == 1 or not out_of_memory(error):
                raise
        release()  # outside of the except block, where the error no longer references tensors
        batch //= 2
        log.info("out of memory: evaluating %d samples at a time", batch)


def _predicted(split: Split, model: Model, data: Arrays, batch: int) -> Iterator[tuple[Any, Tensor]]:
    for start in range(0, len(data), batch):
        rows = slice(start, start + batch)  # views, no copies
        yield split.predict(model, tree.map(lambda a, rows=rows: a[rows], data.x)), data.y[rows]


def measured(batches: Iterable[tuple[Any, Tensor]], metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the value of each metric over batches of outputs and targets; "loss" is a mean over the samples."""
    measures: dict[str, _Measure] = {}
    seen: list[Any] = []  # outputs and targets, if a metric wants all of them at once
    for out, y in batches:
        if not measures:
            begun = {name: _begun(name, metric, out, y) for name, metric in metrics.items()}
            measures = {name: measure for name, measure in begun.items() if measure is not None}
        else:
            for measure in measures.values():
                measure.update(out, y)
        if len(measures) < len(metrics):
            seen.append(tree.map(Tensor.cpu, (out, y)))
    found = {name: measure.value() for name, measure in measures.items()}
    if seen:
        everything = tree.map(lambda *parts: torch.cat(parts), *seen)
        found |= {k: _number(k, fn(*everything)) for k, fn in metrics.items() if k not in found and callable(fn)}
    return {name: found[name] for name in metrics}


def finite_or_none(value: float) -> float | None:
    """Return None for a value that is not finite, as JSON has no NaN."""
    return value if math.isfinite(value) else None


class _Measure(Protocol):
    """A metric in the course of an evaluation."""

    def update(self, out: Any, y: Tensor) -> None: ...

    def value(self) -> float: ...


def _begun(name: str, metric: Metric, out: Any, y: Tensor) -> _Measure | None:
    """Return a metric after the first batch, or None if it is one number for all samples, as shows there."""
    if isinstance(metric, Accumulating):
        return _Fed(name, metric, out, y)
    if name == "loss":
        return _Mean(name, metric, metric(out, y), out, y)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = torch.as_tensor(metric(out, y))
    except Exception as error:
        if out_of_memory(error):
            raise
        return None  # undefined on a part, such as an area under a curve of one class; if it is wrong, it fails again
    if values.dim():
        return _Mean(name, metric, values, out, y)
    if broadcasts(metric, out, y):
        raise broadcasting(f"the metric {name!r}", out, y)
    return None


class _Mean:
    """The mean of a metric over the samples; ignored targets weigh nothing."""

    def __init__(self, name: str, fn: Function, first: Tensor, out: Any, y: Tensor) -> None:
        self.name, self.fn = name, fn
        value, self.num = self._mean(first, out, y)
        self.total = self.num * value

    def update(self, out: Any, y: Tensor) -> None:
        value, num = self._mean(self.fn(out, y), out, y)
        self.total, self.num = self.total + num * value, self.num + num

    def value(self) -> float:
        return float(self.total / self.num)

    def _mean(self, values: Tensor, out: Any, y: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return the mean over a batch and its weight: the number of samples, less the share of ignored targets."""
        if values.dim() and values.numel() not in (len(y), y.numel()):
            shapes = [str(tuple(a.shape)) if isinstance(a, Tensor) else type(a).__name__ for a in (values, out, y)]
            raise ConfigError(
                f"the metric {self.name!r} returned the shape {shapes[0]} for outputs of {shapes[1]} and targets of "
                f"{shapes[2]}; return a number for each sample or each target, or a single one for all"
            )
        values = torch.as_tensor(values).double()
        counted = _counted(values, out, following(y) if self.fn is next_token else y)
        if counted is None or bool(counted.all()):
            return values.mean(), len(y)
        share = counted.double().mean()
        value = values[counted].mean() if values.dim() else values
        return torch.where(share > 0, value, 0.0), len(y) * share


def _counted(values: Tensor, out: Any, y: Tensor) -> Tensor | None:
    """Return which targets count in the values of a metric, or in the loss, which is a single one; None: all."""
    if values.dim():  # a metric marks what it leaves out as NaN
        alike = values.numel() == y.numel()
        return ~(ignored(y).reshape(values.shape) & values.isnan()) if alike else None
    has_classes = not isinstance(out, Tensor) or binary(out, y) is None  # or else -100 is a number like others
    return ~ignored(y) if has_classes else None


class _Fed:
    """A metric that accumulates batches itself."""

    def __init__(self, name: str, metric: Accumulating, out: Any, y: Tensor) -> None:
        self.name, self.metric = name, metric
        if isinstance(metric, Movable):
            metric.to(y.device)
        metric.reset()
        self.update(out, y)

    def update(self, out: Any, y: Tensor) -> None:
        self.metric.update(out, y)

    def value(self) -> float:
        return _number(self.name, self.metric.compute())


def _number(name: str, value: Any) -> float:
    """Return the value of a metric over the whole set."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(
            f"over the whole set the metric {name!r} is a {type(value).__name__}; return a single number"
        ) from None
