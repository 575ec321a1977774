"""Evaluation on samples that devices hold for testing. They stay there, and so do labels that stay in training.

With two parts, activations and labels of test samples go up as those of training samples do. In the U-shape the
server's outputs come down, and with a method that trains whole models at the clients nothing crosses but the model; in
both cases a device sends only its figures, of all its test samples at once.

A device runs these functions on its test samples only, and the functions of its method on its training samples only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlayer.core.batches import Batching
from cutlayer.core.kinds import ACTIVATIONS, LABELS, MODEL, SCALARS
from cutlayer.core.method import Method
from cutlayer.core.places import Clients, Step
from cutlayer.core.program import Program, at_client
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model
from cutlayer.core.tree import Tree
from cutlayer.core.values import Held, PerClient
from cutlayer.runs.evaluation import finite_or_none, measured
from cutlayer.runs.federated import Figures, Found
from cutlayer.runs.metrics import Metric
from cutlayer.split import Split

MOST = 256  # samples in a batch
BATCHES = Batching(size=MOST, drop_last=False)
Metrics = Mapping[str, Metric]


@dataclass(frozen=True, kw_only=True)
class Lower:
    """The client's layers below the cut, in eval mode."""

    model: Split
    labels_leave: bool

    @at_client(gives=ACTIVATIONS)
    def run(self, model: Model, x: Any) -> Any:
        return self.model.predict_part("lower", model, x)


@dataclass(frozen=True, kw_only=True)
class OwnFigures:
    """The figures of a client that has the outputs: loss and metrics over all its test samples."""

    model: Split
    metrics: Metrics

    @at_client(gives=SCALARS)
    def of_head(self, model: Model, h: Any, y: Tensor) -> Tensor:
        return self._figures(self.model.predict_part("top", model, h), y)

    @at_client(gives=SCALARS)
    def of_whole(self, model: Model, x: Any, y: Tensor) -> Tensor:
        return self._figures(self.model.predict(model, x), y)

    def _figures(self, out: Any, y: Tensor) -> Tensor:
        found = [self.model.loss(out, y), *(fn(out, y) for fn in self.metrics.values() if callable(fn))]
        values = torch.stack([torch.as_tensor(value).double().mean() for value in found])
        known = values.isfinite()  # servers refuse numbers that are not, such as an area under a curve of one class
        return torch.stack([torch.where(known, values, 0.0), known.double()])


@dataclass(frozen=True, kw_only=True)
class Examination:
    """Runs the global model on the clients' test samples, with the layers where they are in training."""

    model: Split
    metrics: Metrics
    lower: Lower | None  # None if clients hold the whole model
    own: OwnFigures | None  # None if the server has outputs and labels

    @classmethod
    def of(cls, method: Method, metrics: Metrics) -> "Examination":
        """Return the test of this method's model, with labels where the method has them."""
        model, labels_leave = method.model, Program(method).labels is not None
        splits = labels_leave or model.u_shaped
        return cls(
            model=model,
            metrics=metrics,
            lower=Lower(model=model, labels_leave=labels_leave) if splits else None,
            own=None if labels_leave else OwnFigures(model=model, metrics=metrics),
        )

    def figures(
        self, model: Model, clients: Clients, server: Server, fed: Fed, real: Callable[[Tree], Tree]
    ) -> dict[int, Figures]:
        """Return what each client's test found; a client that disconnects is left out."""
        below, above = (model, model) if self.lower is None else (_named(model, names) for names in self.model.sides)
        c, s = clients.down(MODEL, fed.hold(below)), server.hold(above)
        sizes = {j: self.batch_size(int(num)) for j, num in clients.weights.items()}
        found: dict[int, list[Tree]] = {j: [] for j in clients.ids}
        for step in clients.steps(sizes=sizes):
            for j, seen in self._batch(step, server, c, s).items():
                found[j].append(real(seen))
        samples = {j: int(clients.weights[j]) for j in clients.alive}
        return {j: Figures(num, self._merged(found[j])) for j, num in samples.items()}

    def batch_size(self, num: int) -> int:
        """Return the size of the batches of a client with so many test samples.

        A client that computes its figures has one batch: some metrics are a number for the whole set.
        """
        return even(num) if self.own is None else num

    def _batch(self, step: Step, server: Server, c: PerClient, s: Held) -> dict[int, Tree]:
        """Return what the server has of each client's batch: outputs and labels, or figures."""
        active = step.active
        if self.lower is None:
            assert self.own is not None
            figures = active.up(SCALARS(active.do(self.own.of_whole, c, step.x, step.y)))
            return {j: figures.row(j) for j in figures.ids}
        z = active.do(self.lower.run, c, step.x)
        if self.own is None:
            z, y = active.up(ACTIVATIONS(z), LABELS(step.y))
            out = server.each(self._upper, server.copies(s, active), z)
            return {j: (out.row(j), y.row(j)) for j in out.ids}
        h = server.each(self._upper, server.copies(s, active), active.up(ACTIVATIONS(z)))
        figures = active.up(SCALARS(active.do(self.own.of_head, c, active.down(ACTIVATIONS, h), step.y)))
        return {j: figures.row(j) for j in figures.ids}

    def _upper(self, model: Model, z: Any) -> Any:
        return self.model.predict_part("upper", model, z)

    def _merged(self, seen: list[Tree]) -> Found:
        if self.own is None:
            found = measured(seen, {"loss": self.model.loss, **self.metrics})
            return {name: finite_or_none(value) for name, value in found.items()}
        ((values, known),) = (figures.tolist() for figures in seen)
        names = ("loss", *self.metrics)
        return {name: v if is_known else None for name, v, is_known in zip(names, values, known, strict=True)}


def even(num: int) -> int:
    """Return the size of equal batches for so many samples; a last batch of one sample would not be loaded."""
    fewest = -(-num // -(-num // MOST))
    return next(size for size in range(fewest, num + 1) if num % size != 1)


def _named(model: Model, names: frozenset[str]) -> Model:
    return Model(*({k: v for k, v in values.items() if k in names} for values in model))
