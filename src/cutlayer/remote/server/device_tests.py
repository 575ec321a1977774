"""The clients' own test samples, on devices."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from cutlayer.core import keys
from cutlayer.core.batches import Walk
from cutlayer.core.places import Clients, World
from cutlayer.core.precision import Precision, computing
from cutlayer.core.program import Program
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Model
from cutlayer.data.arrays import Arrays
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.runs.examination import BATCHES, Examination
from cutlayer.runs.federated import Figures, Found

log = logging.getLogger("cutlayer")


@dataclass(frozen=True, kw_only=True)
class DeviceTests:
    """Tests the model on every device that is present and holds samples for it. This traffic is not in the ledger."""

    backend: DeviceBackend
    examination: Examination
    certain: bool  # whether every device holds samples out
    seed: int
    precision: Precision

    def check(self, clients: Mapping[int, str]) -> None:
        """Nothing is known before devices join."""

    @torch.no_grad()
    def figures(self, evaluate: Callable[[Arrays], Found], model: Model, round: int) -> dict[str, Figures]:
        """Return what each device's test found, by its name; nothing if no device holds test samples."""
        tests, names = self.backend.tests(), self.backend.names()
        key = keys.fold(self.seed, "tests", round)
        index = {j: range(num) for j, num in tests.items()}
        if not tests:
            return {}
        try:
            with self.backend.attempt(round, key, tests, tests=True) as attempt, computing(self.precision):
                world = World(
                    program=Program(self.examination),
                    transport=attempt.transport,
                    walk=partial(Walk, BATCHES, index, key),
                    sizes={j: float(num) for j, num in tests.items()},
                    key=key,
                )
                clients, servers = Clients(world, tuple(tests)), (Server(attempt.server), Fed(attempt.fed))
                found = self.examination.figures(model, clients, *servers, attempt.server.real)
        except AllClientsLost:
            log.warning("round %d: every device was lost while it tested the model", round)
            return {}
        return {names[j]: figures for j, figures in found.items()}
