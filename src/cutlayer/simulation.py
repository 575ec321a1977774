"""A method in simulation: all clients of a partition on this machine, round after round."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from cutlayer import keys, tree
from cutlayer.batches import Batching, Walk, check_batch
from cutlayer.checks import check_type
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment
from cutlayer.data.partition import Partition
from cutlayer.engines.auto import fastest, obstacle
from cutlayer.engines.base import Engine
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.lane import NotKept
from cutlayer.engines.graph.recorder import Cuda
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.errors import ConfigError, PartitionError, UnknownNameError
from cutlayer.kinds import ACTIVATIONS
from cutlayer.memory import Memory
from cutlayer.meters.base import Meter, Restorable
from cutlayer.meters.clock import Clock, NoClock, Timer
from cutlayer.meters.ledger import Ledger
from cutlayer.methods.base import Method
from cutlayer.pieces.sampler import uniform
from cutlayer.places import Clients, World
from cutlayer.planning.devices import Devices
from cutlayer.precision import Precision, check_precision, computing
from cutlayer.program import Program
from cutlayer.reach import Here, Reach
from cutlayer.scarcity import out_of_memory, release
from cutlayer.servers import Fed, Server
from cutlayer.split import Split
from cutlayer.state import State
from cutlayer.values import settled

if TYPE_CHECKING:
    from cutlayer.remote.kept import Statements
    from cutlayer.remote.on_ray import Fleet

log = logging.getLogger("cutlayer")
ENGINES = ("auto", "loop", "vmap", "graph", "ray")
MOST_SURPRISES = 5  # values of a round that recordings should have kept, before they keep whatever is held
TOO_SHORT = "the GPU's memory is too short even for one client at a time; take smaller batches, or precision 'bf16'"
HOW_ARRAYS = "as cutlayer.from_arrays, from_dataset or load make them"


class Simulation:
    """Runs rounds of a method.

    All it remembers between rounds is what its clients keep, the ledger, the clock and which engine it uses.
    """

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
        precision: Precision = "fp32",
        meters: tuple[Meter, ...] = (),
        devices: Devices | None = None,
        augment: Augment | None = None,
    ) -> None:
        check_type("data", data, Arrays, HOW_ARRAYS)
        check_type("partition", partition, Partition, "as cutlayer.iid, dirichlet, shards or natural draw one")
        check_type("batching", batching, Batching, "such as Batching(size=32)")
        check_type("the method's model", method.model, Split, "such as Split(net, cut=1)")
        _check_partition(partition, len(data))
        check_batch(batching, partition.clients)
        _check_length(method, batching)
        check_precision(precision, method.model.model)
        planned_for = getattr(method, "num_clients", None)  # of a method with a list of clients
        if planned_for not in (None, len(partition)):
            raise ConfigError(f"the method's lists are for {planned_for} clients, but there are {len(partition)}")
        self.method, self.data, self.partition, self.batching, self.seed = method, data, partition, batching, seed
        self.ids = tuple(
            j for j, index in enumerate(partition.clients) if batching.per_epoch(len(index), batching.size)
        )
        self.per_round = _checked_per_round(per_round, len(self.ids), getattr(method, "fewest", 1))
        self.ledger = Ledger()
        self.clock = None if devices is None else Clock(_checked_devices(devices, len(partition)))
        self.meters: tuple[Meter, ...] = (self.ledger, *meters)
        self._memory = Memory()
        self.augment, self.precision = augment, precision
        self.program = Program(method)
        self._chunk = _checked_chunk(chunk)
        with computing(precision):
            self._rehearse()
        self._asked = engine
        self._fleet = self._on_ray() if engine == "ray" else None
        self.engine = self._fleet or self._engine(engine)
        self._warn_of_raw_input()

    @property
    def num_classes(self) -> int | None:
        return self.data.num_classes

    @property
    def engine_name(self) -> str | None:
        """None until one is chosen."""
        return None if self.engine is None else self.engine.name

    @property
    def memory(self) -> "Memory | Statements":
        """What clients keep between rounds, or what is known of it."""
        return self._memory if self._fleet is None else self._fleet.memory

    def names(self) -> dict[int, str]:
        """Of the clients that can take part."""
        return {j: self.partition.names[j] for j in self.ids}

    def samples_of(self, client: int) -> Arrays:
        return self.data.take(self.partition.clients[client])

    def start(self) -> State:
        """The state before the first round."""
        return self.method.start(Server(Loop()), Fed(Loop()))

    def round(self, state: State) -> State:
        """The state after one more round with a fresh sample of clients."""
        key = keys.fold(self.seed, "round", state.round)
        ids = uniform(self.ids, self.per_round, key)
        if self._fleet is not None:
            return self._round_on_ray(self._fleet, key, state, ids)
        if self.engine is None:
            self.engine = self._vmap_or_loop(state, ids) if self._asked == "vmap" else self._fastest(state, ids)
        if isinstance(self.engine, Graph):
            return self._recorded(state, ids)
        return self._timed(self.engine, state, ids)

    def _timed(self, engine: Engine, state: State, ids: tuple[int, ...]) -> State:
        if self.clock is None:
            return self._run(engine, self.meters, NoClock(), state, ids, self._memory)
        self.clock.begin()
        state = self._run(engine, self.meters, self.clock, state, ids, self._memory)
        self.clock.end()
        return State(*settled(tuple(state)))

    def _recorded(self, state: State, ids: tuple[int, ...]) -> State:
        """A round for which memory was too short did not happen; it begins again with half as many that have some."""
        rewind = self._bookmark()
        while True:  # not for ever: in the end one client at a time has memory
            engine = self.engine
            assert isinstance(engine, Graph)
            try:
                return self._kept(engine, state, ids, rewind)
            except BaseException as error:
                engine.forget()
                if not out_of_memory(error):
                    raise
                if engine.slots == 1:
                    raise ConfigError(TOO_SHORT) from error
            rewind()  # and the rest here, where the error holds nothing of the engine any more
            self.engine = engine = _halved(engine)
            release()

    def _kept(self, engine: Graph, state: State, ids: tuple[int, ...], rewind: Callable[[], None]) -> State:
        """A round in which a recording turned out to keep too little did not happen, and is played again."""
        attempt = 0
        while True:  # not for ever: in the end everything is kept
            attempt += 1
            try:
                return self._timed(engine, state, ids)
            except NotKept:
                engine.forget(keep_all=attempt >= MOST_SURPRISES)
                log.info("engine graph: round %d is played again, with more kept of it", state.round + 1)
                rewind()

    def _bookmark(self) -> Callable[[], None]:
        """What goes back to now: meters, the clock and what clients keep."""
        stored = [s for s in (*self.meters, self.clock, self._memory) if isinstance(s, Restorable)]
        now = [s.content() for s in stored]

        def rewind() -> None:
            for one, content in zip(stored, now, strict=True):
                one.restore(content)

        return rewind

    def _run(
        self,
        engine: Engine,
        meters: tuple[Meter, ...],
        clock: Timer,
        state: State,
        ids: tuple[int, ...],
        memory: Memory,
        most_steps: int | None = None,
    ) -> State:
        key = keys.fold(self.seed, "round", state.round)
        reach = Here(engine=engine, data=self.data, kept=memory, key=key, augment=self.augment)
        return self._play(reach, engine, meters, clock, state, ids, most_steps)

    def _round_on_ray(self, fleet: "Fleet", key: int, state: State, ids: tuple[int, ...]) -> State:
        before = self.ledger.content()

        def play(reach: Reach) -> State:
            self.ledger.restore(before)  # an attempt that failed did not happen
            return self._play(reach, fleet, self.meters, NoClock(), state, ids)

        return fleet.round(state.round, key, ids, play)

    @torch.no_grad()
    def _play(
        self,
        reach: Reach,
        engine: Engine,
        meters: tuple[Meter, ...],
        clock: Timer,
        state: State,
        ids: tuple[int, ...],
        most_steps: int | None = None,
    ) -> State:
        """One round with these clients, however they are reached; servers compute on the engine."""
        key = keys.fold(self.seed, "round", state.round)
        index = self.partition.clients

        def walk(sizes: Mapping[int, int]) -> Walk:
            return Walk(self.batching, index, key, sizes)

        world = World(
            program=self.program,
            reach=reach,
            walk=walk,
            sizes={j: float(len(index[j])) for j in ids},
            key=key,
            meters=meters,
            clock=clock,
            most_steps=most_steps,
        )
        servers = Server(engine, meters, clock), Fed(engine, meters, clock)
        with computing(self.precision):
            return State(*engine.real(tuple(self.method.round(state, Clients(world, ids), *servers))))

    def _on_ray(self) -> "Fleet":
        """Clients in the actors of a Ray cluster, which cannot tell when on a simulated clock they are done."""
        from cutlayer.remote.crew import Kit
        from cutlayer.remote.on_ray import Fleet

        if self.clock is not None:
            log.warning("engine ray keeps no simulated clock")
            self.clock = None
        kit = Kit(method=self.method, batching=self.batching, augment=self.augment, precision=self.precision)
        return Fleet(kit, self.program, self.data, self.partition)

    def _engine(self, name: str) -> Engine | None:
        """The engine of this name; None stands for one that the first round has to choose or to try."""
        if name not in ENGINES:
            raise UnknownNameError("engine", name, ENGINES)
        on_gpu = self.data.y.device.type == "cuda"
        if name == "loop":
            return Loop()
        if self.method.model.random:
            recorded = name == "graph" or (name == "auto" and on_gpu)
            why = "graph cannot record" if recorded else "vmap cannot stack"
            log.warning("engine loop: the model draws random numbers in training (dropout), which %s", why)
            return Loop()
        if name == "graph" and not on_gpu:
            log.warning("engine graph needs data on a CUDA device, and these are on the CPU: auto is used instead")
        if on_gpu and name in ("auto", "graph"):
            if name == "auto":
                log.info("engine auto: graph; the data are on a GPU")
            return Graph(Cuda(self.data.y.device), min(self._chunk or self.per_round, self.per_round))
        return None

    def _fastest(self, state: State, ids: tuple[int, ...]) -> Engine:
        def timed(engine: Engine, steps: int) -> None:
            for some in tree.tensors(self._tried(engine, steps, state, ids))[:1]:
                some.flatten()[:1].tolist()  # wait for a GPU to finish

        on_cpu = self.data.y.device.type == "cpu"
        pick = fastest([Loop(), Vmap(self._chunk)], timed, len(ids), on_cpu)
        log.info("engine auto: %s; %s", pick.engine.name, pick.reason)
        return pick.engine

    def _vmap_or_loop(self, state: State, ids: tuple[int, ...]) -> Engine:
        engine = Vmap(self._chunk)
        why_not = obstacle(lambda engine, steps: self._tried(engine, steps, state, ids), engine)
        if why_not is None:
            return engine
        log.warning("engine loop: vmap cannot run this model (%s)", why_not)
        return Loop()

    def _tried(self, engine: Engine, steps: int, state: State, ids: tuple[int, ...]) -> State:
        """A round of so many steps that nobody hears of."""
        return self._run(engine, (), NoClock(), state, ids, self._memory.fork(), most_steps=steps)

    def _rehearse(self) -> None:
        """A model or batch sizes that cannot work are told of now, before a run writes or deletes anything."""
        rule = getattr(self.method, "sizes", None)  # of a method that regulates batch sizes
        sizes = rule(self.ids[-self.per_round :], self.batching.size) if callable(rule) else {}
        num = min(2, self.batching.size, getattr(self.method, "smallest_batch", 2), *sizes.values())
        few = self.data.take(self.partition.clients[self.ids[0]][:num])
        if self.augment is not None:
            if not isinstance(few.x, torch.Tensor) or few.x.dim() != 4:
                raise ConfigError("augment changes images, but the inputs of these data are none; leave it out")
            self.augment(few.x[None], [0])
        self.method.model.rehearse(few.x, few.y, self.data.num_classes)

    def _warn_of_raw_input(self) -> None:
        sends = any(getattr(fn, "gives", None) == ACTIVATIONS for fn in self.program.functions.values())
        if self.method.model.cut == 0 and sends:
            log.warning("cut 0 leaves no layer at the clients: what goes up as activations is their raw input")


def _halved(engine: Graph) -> Graph:
    """An engine that takes less memory, and the news of it."""
    smaller = engine.halved()
    told = "engine graph: memory is too short for %d clients at a time; the round is played again with %d, in turns"
    log.warning(told, engine.slots, smaller.slots)
    return smaller


def _check_partition(partition: Partition, num_samples: int) -> None:
    if not len(partition):
        raise PartitionError("the partition has no clients; deal the data to at least one")
    for name, index in zip(partition.names, map(np.asarray, partition.clients), strict=True):
        if len(index) and index.dtype.kind not in "iu":
            raise PartitionError(f"client {name} holds indices of type {index.dtype}; give the numbers of its samples")
        wrong = index[(index < 0) | (index >= num_samples)]
        if len(wrong):
            raise PartitionError(
                f"client {name} holds the index {wrong[0]}, but the data have the samples 0 to {num_samples - 1}; "
                "draw the partition from these data"
            )


def _check_length(method: Method, batching: Batching) -> None:
    """A method that counts a round's mini-batches itself is not told another number."""
    if getattr(method, "counts_steps", False) and (batching.steps is not None or batching.epochs != 1):
        given = "steps" if batching.steps is not None else "epochs"
        raise ConfigError(f"this method counts the mini-batches of a round itself; leave {given} out of the batching")


def _checked_devices(devices: Devices, num_clients: int) -> Devices:
    if len(devices.clients) < num_clients:
        raise ConfigError(f"there are {len(devices.clients)} devices for {num_clients} clients; give each client one")
    return devices


def _checked_chunk(chunk: int | None) -> int | None:
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ConfigError(f"chunk is {chunk!r}; it must be at least 1, or None for all clients at once")
    return chunk


def _checked_per_round(per_round: int | None, num_clients: int, fewest: int) -> int:
    if num_clients == 0:
        raise ConfigError("no client holds at least 2 samples, so nobody can train; use fewer clients or more data")
    chosen = num_clients if per_round is None else per_round
    if not 1 <= chosen <= num_clients:
        raise ConfigError(f"per_round is {per_round}; it must be from 1 to the {num_clients} clients that hold data")
    if chosen < fewest:
        raise ConfigError(f"this method needs at least {fewest} clients a round, but per_round is {chosen}")
    return chosen
