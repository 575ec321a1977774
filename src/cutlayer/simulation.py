"""A method in simulation: all clients of a partition on this machine, round after round."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch

from cutlayer import keys
from cutlayer.batches import Batching, Walk, check_batch
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.auto import fastest
from cutlayer.engines.base import Engine
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.meters.base import Meter
from cutlayer.meters.ledger import Ledger
from cutlayer.methods.base import Method
from cutlayer.pieces.sampler import uniform
from cutlayer.places import Clients, World
from cutlayer.program import Program
from cutlayer.servers import Fed, Server
from cutlayer.state import State

log = logging.getLogger("cutlayer")
ENGINES = ("auto", "loop", "vmap")


class Simulation:
    """Runs rounds of a method. All it remembers between rounds is the ledger and which engine it uses."""

    def __init__(
        self,
        method: Method,
        data: Arrays,
        partition: Partition,
        *,
        batching: Batching = Batching(),
        per_round: int | None = None,
        engine: str = "auto",
        chunk: int | None = None,
        seed: int = 0,
        meters: tuple[Meter, ...] = (),
    ) -> None:
        check_batch(batching, partition.clients)
        self.method, self.data, self.partition, self.batching, self.seed = method, data, partition, batching, seed
        self.ids = tuple(
            j for j, index in enumerate(partition.clients) if batching.per_epoch(len(index), batching.size)
        )
        self.per_round = _checked_per_round(per_round, len(self.ids))
        self.ledger = Ledger()
        self.meters: tuple[Meter, ...] = (self.ledger, *meters)
        self.program = Program(method)
        self._chunk = chunk
        self.engine = self._engine(engine)

    def start(self) -> State:
        """The state before the first round."""
        return self.method.start(Server(Loop()), Fed(Loop()))

    def round(self, state: State) -> State:
        """The state after one more round with a fresh sample of clients."""
        ids = uniform(self.ids, self.per_round, keys.fold(self.seed, "round", state.round))
        if self.engine is None:
            self.engine = self._fastest(state, ids)
        return self._run(self.engine, self.batching, self.meters, state, ids)

    @torch.no_grad()
    def _run(
        self, engine: Engine, batching: Batching, meters: tuple[Meter, ...], state: State, ids: tuple[int, ...]
    ) -> State:
        key = keys.fold(self.seed, "round", state.round)
        index = self.partition.clients

        def walk(sizes: Mapping[int, int]) -> Walk:
            return Walk(batching, index, key, sizes)

        world = World(
            engine=engine,
            program=self.program,
            data=self.data,
            walk=walk,
            sizes={j: float(len(index[j])) for j in ids},
            key=key,
            meters=meters,
        )
        return self.method.round(state, Clients(world, ids), Server(engine, meters), Fed(engine, meters))

    def _engine(self, name: str) -> Engine | None:
        """The engine of this name; None stands for the one that the first round will choose."""
        if name not in ENGINES:
            raise UnknownNameError("engine", name, ENGINES)
        if name == "loop":
            return Loop()
        if self.method.model.random:
            log.warning(
                "engine loop: the model draws random numbers in training (dropout), which %s cannot stack", name
            )
            return Loop()
        return Vmap(self._chunk) if name == "vmap" else None

    def _fastest(self, state: State, ids: tuple[int, ...]) -> Engine:
        def probe(engine: Engine, steps: int) -> None:
            after = self._run(engine, replace(self.batching, steps=steps), (), state, ids)
            float(after.report.tree.loss)  # wait for a GPU to finish

        on_cpu = self.data.y.device.type == "cpu"
        choice = fastest([Loop(), Vmap(self._chunk)], probe, len(ids), on_cpu)
        log.info("engine auto: %s; %s", choice.engine.name, choice.reason)
        return choice.engine


def _checked_per_round(per_round: int | None, num_clients: int) -> int:
    if num_clients == 0:
        raise ConfigError("no client holds at least 2 samples, so nobody can train; use fewer clients or more data")
    if per_round is None:
        return num_clients
    if not 1 <= per_round <= num_clients:
        raise ConfigError(f"per_round is {per_round}; it must be from 1 to the {num_clients} clients that hold data")
    return per_round
