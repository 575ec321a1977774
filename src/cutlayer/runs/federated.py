"""Federated evaluation: clients test the model on samples of their own, and the server learns only the numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import pstdev

from cutlayer.core.checks import check_type
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import PartitionError, UnknownNameError
from cutlayer.runs.metrics import GOALS
from cutlayer.runs.simulation import HOW_PARTITION, check_partition

Found = Mapping[str, float | None]  # metrics by name; None if not finite


@dataclass(frozen=True)
class ClientTests:
    """The test sets of the clients: which client holds which of the samples."""

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

    def of(self, name: str) -> Arrays:
        return self.data.take(self.partition.clients[self.partition.names.index(name)])

    def size(self, name: str) -> int:
        return len(self.partition.clients[self.partition.names.index(name)])


def summary(found: Mapping[str, Found], sizes: Mapping[str, int]) -> dict[str, float | None]:
    """Return each metric as its mean over the clients, weighted by their samples, its spread, and its worst value.

    A client for which a metric is not defined, such as an area under a curve of one class, is left out of it. The loss
    must be finite at all of them.
    """
    told: dict[str, float | None] = {}
    for metric in next(iter(found.values())):
        values = {name: v for name, of_client in found.items() if (v := of_client[metric]) is not None}
        if metric == "loss" and len(values) < len(found):
            values = {}
        weight = sum(sizes[name] for name in values)
        told[metric] = math.fsum(sizes[name] * v for name, v in values.items()) / weight if values else None
        told[f"{metric}_std"] = pstdev(values.values()) if values else None
        if metric in GOALS:
            worst = min if GOALS[metric] == "max" else max
            told[f"{metric}_worst"] = worst(values.values()) if values else None
    return told
