"""Federated evaluation: clients test the model on samples of their own, which stay with them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import pstdev
from typing import NamedTuple, Protocol

from cutlayer.core.checks import check_type
from cutlayer.core.state import Model
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import PartitionError, UnknownNameError
from cutlayer.runs.metrics import GOALS
from cutlayer.runs.simulation import HOW_PARTITION, check_partition

Found = Mapping[str, float | None]  # metrics by name; None if not finite


class Figures(NamedTuple):
    """What a client's test found."""

    samples: int
    values: Found


class TestsOfClients(Protocol):
    """The test sets of clients, wherever the clients are."""

    @property
    def certain(self) -> bool:
        """Whether every evaluation has figures, so that they can be monitored."""

    def check(self, clients: Mapping[int, str]) -> None:
        """Refuse tests that cannot work with these clients."""

    def figures(self, evaluate: Callable[[Arrays], Found], model: Model, round: int) -> dict[str, Figures]:
        """Return what each client's test of the model found, by the name of the client."""


@dataclass(frozen=True)
class ClientTests:
    """The test sets of clients in a simulation: which client holds which of the samples."""

    certain = True

    data: Arrays
    partition: Partition

    def check(self, clients: Mapping[int, str]) -> None:
        """Refuse sets of clients that do not take part, and sets without a sample."""
        check_type("test_partition", self.partition, Partition, HOW_PARTITION)
        check_partition(self.partition, len(self.data))
        for name in self.names:
            if name not in clients.values():
                raise UnknownNameError("client", name, clients.values(), "test_partition")
        if not self.names:
            raise PartitionError("no client holds a sample to test on; give some client one, or leave the tests out")

    @property
    def names(self) -> list[str]:
        """The clients that hold samples to test on."""
        return [name for name, index in zip(self.partition.names, self.partition.clients, strict=True) if len(index)]

    def figures(self, evaluate: Callable[[Arrays], Found], model: Model, round: int) -> dict[str, Figures]:
        return {name: Figures(len(self._of(name)), evaluate(self._of(name))) for name in self.names}

    def _of(self, name: str) -> Arrays:
        return self.data.take(self.partition.clients[self.partition.names.index(name)])


def summary(found: Mapping[str, Figures]) -> dict[str, float | None]:
    """Return each metric as its mean over the clients, weighted by their samples, its spread, and its worst value.

    A client for which a metric is not defined, such as an area under a curve of one class, is left out of it. The loss
    must be finite at all of them.
    """
    told: dict[str, float | None] = {}
    for metric in next(iter(found.values())).values:
        values = {name: v for name, figures in found.items() if (v := figures.values[metric]) is not None}
        if metric == "loss" and len(values) < len(found):
            values = {}
        weight = sum(found[name].samples for name in values)
        told[metric] = math.fsum(found[name].samples * v for name, v in values.items()) / weight if values else None
        told[f"{metric}_std"] = pstdev(values.values()) if values else None
        if metric in GOALS:
            worst = min if GOALS[metric] == "max" else max
            told[f"{metric}_worst"] = worst(values.values()) if values else None
    return told
