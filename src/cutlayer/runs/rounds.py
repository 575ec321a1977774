"""The only runner of rounds: it samples clients, derives keys, sets the precision and makes each round a transaction.

A round is a function of the state before it. If an attempt fails, the runner restores every meter, the clock and the
clients' memory, asks the backend to recover, and retries.
"""

import logging
import math
from collections.abc import Hashable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch

from cutlayer.core import keys
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.checks import check_most_weight
from cutlayer.core.codec import Coder
from cutlayer.core.crossing import Seam
from cutlayer.core.engine import Engine
from cutlayer.core.guard import Guard
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.meter import Meter, Restorable, Timer
from cutlayer.core.method import Method, needs_of
from cutlayer.core.places import Clients, World
from cutlayer.core.precision import Precision, computing
from cutlayer.core.program import Program
from cutlayer.core.servers import Bridge, Fed, Keeper, Server
from cutlayer.core.state import State
from cutlayer.core.transport import Transport
from cutlayer.core.values import settled
from cutlayer.data.arrays import Arrays
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError
from cutlayer.meters.clock import Clock
from cutlayer.meters.ledger import Ledger
from cutlayer.pieces.sampler import Draw, Sampler, uniform
from cutlayer.runs.checks import check_batch

MOST_NAMED = 10  # clients in a message
log = logging.getLogger("cutlayer")


class Attempt(NamedTuple):
    """The transport and the engines of one attempt at a round."""

    transport: Transport
    server: Engine
    fed: Engine
    bridge: Bridge = Bridge()


class Backend(Protocol):
    """Says where the clients are: how a round reaches them, and how it recovers from errors."""

    engine: Engine  # for the servers, and for clients in this process
    memory: Any  # Restorable: what clients keep between rounds, or what the servers know about it
    coders: Mapping[Kind, Coder]  # of the kinds that have a codec

    @property
    def name(self) -> str:
        """The name of the engine in records."""

    @property
    def num_classes(self) -> int | None:
        """The number of classes of the clients' data; None if the task is not a classification."""

    @property
    def resolved(self) -> Mapping[str, Any]:
        """The settings of a run that were "auto", as this backend resolved them: the engines."""

    def names(self) -> dict[int, str]:
        """Return the names of the clients that can take part, by number."""

    def samples_of(self, client: int) -> Arrays:
        """Return a client's own samples, if they are in this process."""

    def bridge(self) -> Bridge:
        """Return the bridge between the two servers that `start` uses."""

    def drawn(self, round: int) -> dict[int, int] | None:
        """Return the clients, with their sample counts, if another server samples them for this round; else None."""

    def present(self, round: int) -> Mapping[int, int]:
        """Wait until a round can begin, and return the sample count of each client that could take part."""

    def attempt(self, round: int, key: int, samples: Mapping[int, int]) -> AbstractContextManager[Attempt]:
        """Begin an attempt at a round with these clients; leaving the block without an error finishes it."""

    def recover(self, error: BaseException, attempt: int) -> None:
        """Prepare a retry after attempt number `attempt` failed; raise if a retry cannot help."""


@dataclass(eq=False)
class Rounds:
    """Runs rounds of a method on a backend."""

    method: Method
    backend: Backend
    _: KW_ONLY
    batching: Batching = Batching()
    per_round: int | None = None  # clients that take part in a round; all of them by default
    sampler: Sampler = uniform
    seed: int = 0
    precision: Precision = "fp32"
    meters: tuple[Meter, ...] = ()  # besides the ledger, which is put in front of them
    clock: Clock | None = None
    guard: bool = True  # drop updates that are out of all proportion to the others
    most_weight: float | None = None  # of a client in averages, in medians of the round's samples

    def __post_init__(self) -> None:
        check_most_weight(self.most_weight)
        self.program, self.ledger = Program(self.method, self.coders), Ledger()
        self.meters = (self.ledger, *self.meters)
        self.dropped: Mapping[int, str] = {}  # clients whose updates the guard dropped in the last round, and why

    @property
    def coders(self) -> Mapping[Kind, Coder]:
        return self.backend.coders

    @property
    def engine_name(self) -> str:
        return self.backend.name

    def restorable(self) -> dict[str, Restorable]:
        """Return, by name, everything besides the state that a round may change; checkpoints save it, too."""
        memory = self.backend.memory  # by its type: a server of devices knows versions, a simulation holds the values
        named: dict[str, Any] = {"ledger": self.ledger, "clock": self.clock, type(memory).__name__: memory}
        named |= {f"meter {k}": meter for k, meter in enumerate(self.meters[1:], start=1)}
        return {name: thing for name, thing in named.items() if isinstance(thing, Restorable)}

    def start(self) -> State:
        """Return the state before the first round."""
        bridge = self.backend.bridge()
        return self.method.start(Server(Loop(), bridge=bridge), Fed(Loop(), bridge=bridge))

    def round(self, state: State) -> State:
        """Play one more round with newly sampled clients, and return the state after it."""
        attempt = 0
        while True:  # until a round succeeds, or the backend gives up
            attempt += 1
            before = {name: thing.content() for name, thing in self.restorable().items()}
            try:
                return self._play(state)
            except BaseException as error:
                for name, thing in self.restorable().items():
                    thing.restore(before[name])
                self.backend.recover(error, attempt)
            # Retry outside of the except block, where the error no longer references the tensors of the failed attempt.

    @torch.no_grad()
    def _play(self, state: State) -> State:
        """Play one attempt at a round."""
        key = keys.fold(self.seed, "round", state.round)
        samples = self._sampled(state.round, key)
        index = {j: range(num) for j, num in samples.items()}  # each client maps these numbers to its own samples
        clock = Timer() if self.clock is None else self.clock
        if self.clock is not None:
            self.clock.begin()
        with self.backend.attempt(state.round, key, samples) as attempt, computing(self.precision):
            guard = Guard() if self.guard else None
            server = Server(attempt.server, self.meters, clock, attempt.bridge, guard)
            fed = Fed(attempt.fed, self.meters, clock, attempt.bridge, guard)
            servers: Mapping[Place, Keeper] = {"server": server, "fed": fed}
            world = World(
                program=self.program,
                transport=attempt.transport,
                walk=partial(Walk, self.batching, index, key),
                sizes=self._weights(samples),
                key=key,
                meters=self.meters,
                clock=clock,
                seam=Seam(self.coders, key, servers),
                servers=servers,
                guard=guard,
            )
            after = self.method.round(state, Clients(world, tuple(samples)), server, fed)
            after = State(*attempt.fed.real(attempt.server.real(tuple(after))))
        self.dropped = {} if guard is None else guard.dropped
        for j, why in self.dropped.items():
            log.warning("round %d: the update of client %s %s", after.round, self.backend.names().get(j, j), why)
        if self.clock is None:
            return after
        self.clock.end()
        return State(*settled(tuple(after)))

    def _weights(self, samples: Mapping[int, int]) -> dict[int, float]:
        """Return what each client weighs in averages by samples."""
        most = math.inf if self.most_weight is None else self.most_weight * median(samples.values())
        return {j: min(float(num), most) for j, num in samples.items()}

    def _sampled(self, round: int, key: int) -> dict[int, int]:
        """Return the clients that take part, with their sample counts."""
        drawn = self.backend.drawn(round)
        if drawn is not None:
            return drawn
        present = self.backend.present(round)
        if round == 0:
            check_batch(self.batching, present.values())
        able = {j: num for j, num in present.items() if self.batching.per_epoch(num, self.batching.size)}
        num = min(self.per_round or len(able), len(able))
        draw = Draw(able, num, key, round, needs_of(self.method).fewest_clients)
        return {j: present[j] for j in _drawn(self.sampler, draw)}


def _drawn(sampler: Sampler, draw: Draw) -> tuple[int, ...]:
    """Return the clients that a sampler draws; refuse what are not clients that could take part, or too few."""
    found: object = sampler(draw)
    chosen = tuple(found) if isinstance(found, Iterable) and not isinstance(found, str) else ()
    known = all(isinstance(j, Hashable) and j in draw.samples for j in chosen)
    if not known or len(set(chosen)) < draw.fewest:
        name = getattr(sampler, "__name__", type(sampler).__name__)
        raise ConfigError(
            f"the sampler {name} returned {found!r} for round {draw.round + 1}; return a tuple of at least "
            f"{draw.fewest} of the clients in draw.samples, which are {_listed(tuple(draw.samples))}"
        )
    return tuple(int(j) for j in chosen)


def _listed(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) if len(ids) <= MOST_NAMED else f"{ids[0]} to {ids[-1]}"
