"""A method on clients that are somewhere else, round after round."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from cutlayer import keys
from cutlayer.batches import Batching, Walk
from cutlayer.data.arrays import Arrays
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError
from cutlayer.meters.base import Meter
from cutlayer.meters.ledger import Ledger
from cutlayer.methods.base import Method
from cutlayer.pieces.sampler import uniform
from cutlayer.places import Clients, World
from cutlayer.program import Program
from cutlayer.remote.kept import Statements
from cutlayer.remote.office import Office, RoundId
from cutlayer.remote.remote import Deserted, Remote
from cutlayer.remote.shadow import Shadow
from cutlayer.remote.watch import Nobody, Watcher
from cutlayer.servers import Fed, Server
from cutlayer.state import State

log = logging.getLogger("cutlayer")

Ids = tuple[int, ...]


@dataclass(kw_only=True)
class Deployment:
    """Runs rounds with the clients that are present.

    All it remembers between rounds is what its clients keep, and the ledger.
    """

    method: Method
    office: Office
    sample: Arrays  # a few samples: what everybody's look like
    batching: Batching = Batching()
    per_round: int | None = None
    seed: int = 0
    deadline: float = 60.0  # seconds that a server waits for an answer
    gather: Callable[[int], Ids]  # waits until a round can begin: the clients that are present
    watcher: Watcher = field(default_factory=Nobody)
    meters: tuple[Meter, ...] = ()

    def __post_init__(self) -> None:
        self.program = Program(self.method)
        self.shadow = Shadow(self.program, self.sample)
        self.ledger = Ledger()
        self.memory = Statements()

    @property
    def num_classes(self) -> int | None:
        return self.sample.num_classes

    @property
    def engine_name(self) -> str:
        return "grpc"

    @property
    def clock(self) -> None:
        """Real devices take real time."""

    def names(self) -> dict[int, str]:
        return {j: line.name for j, line in self.office.lines().items()}

    def samples_of(self, client: int) -> Arrays:
        raise ConfigError("per_client needs the clients' samples, which stay with them; leave it out")

    def start(self) -> State:
        """The state before the first round."""
        return self.method.start(Server(Loop()), Fed(Loop()))

    def round(self, state: State) -> State:
        """The state after one more round; one in which every client is lost did not happen, and is tried again."""
        while True:
            kept, ledger = self.memory.fork(), self.ledger.content()
            try:
                after = self._attempt(state, kept)
            except Deserted as error:
                log.warning("%s; it is tried again", error)
                self.ledger.restore(ledger)
                continue
            self.memory = kept
            return after

    @torch.no_grad()
    def _attempt(self, state: State, kept: Statements) -> State:
        key = keys.fold(self.seed, "round", state.round)
        present = self.gather(state.round)
        samples = {j: line.samples for j, line in self.office.lines().items()}
        present = tuple(j for j in present if self.batching.per_epoch(samples.get(j, 0), self.batching.size))
        ids = uniform(present, min(self.per_round or len(present), len(present)), key)
        index = {j: np.arange(samples[j]) for j in ids}

        def walk(sizes: Mapping[int, int]) -> Walk:
            return Walk(self.batching, index, key, sizes)

        remote = Remote(
            office=self.office,
            program=self.program,
            shadow=self.shadow,
            kept=kept,
            round=RoundId.drawn(state.round, key),
            ids=ids,
            deadline=self.deadline,
            num_classes=self.sample.num_classes,
            watcher=self.watcher,
        )
        meters = (self.ledger, *self.meters)
        world = World(
            program=self.program,
            reach=remote,
            walk=walk,
            sizes={j: float(samples[j]) for j in ids},
            key=key,
            meters=meters,
        )
        engine = Loop()
        after = self.method.round(state, Clients(world, ids), Server(engine, meters), Fed(engine, meters))
        remote.finish()
        return after
