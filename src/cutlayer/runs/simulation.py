"""Simulation of a method: all clients of a partition run on this machine, or in the workers of a Ray cluster."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

from cutlayer.core.batches import Batching
from cutlayer.core.checks import check_type
from cutlayer.core.codec import Coder
from cutlayer.core.engine import Engine
from cutlayer.core.kinds import Kind
from cutlayer.core.memory import Memory
from cutlayer.core.method import Method
from cutlayer.core.precision import Precision, computing
from cutlayer.core.servers import Bridge
from cutlayer.core.transport import Augmentation
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.auto import ENGINES, Elsewhere, EngineSetting, chosen, chosen_for_servers
from cutlayer.engines.local import Local
from cutlayer.engines.out_of_memory import release
from cutlayer.errors import ConfigError, PartitionError
from cutlayer.meters.clock import Clock
from cutlayer.pieces.sampler import Available
from cutlayer.planning.devices import Devices
from cutlayer.runs.checks import RunPlan, able, check_labels, check_run
from cutlayer.runs.codecs import Codecs, coders
from cutlayer.runs.rounds import Attempt, Backend, Rounds

log = logging.getLogger("cutlayer")
HOW_ARRAYS = "as cutlayer.from_arrays, from_dataset or load make them"
HOW_PARTITION = "as cutlayer.iid, dirichlet, shards or natural draw one"


@dataclass(eq=False)
class Simulation(Rounds):
    """Runs rounds of a method with the clients of a partition."""

    backend: Backend = field(init=False)
    clock: Clock | None = field(init=False, default=None)
    data: Arrays
    partition: Partition
    _: KW_ONLY
    engine: str | Engine = "auto"
    server_engine: str | Engine = "auto"
    chunk: int | None = None
    codecs: Codecs = field(default_factory=dict)
    devices: Devices | None = None
    augment: Augmentation | None = None
    name: str = ""  # of the method in warnings; by default that of its class

    def __post_init__(self) -> None:
        check_type("data", self.data, Arrays, HOW_ARRAYS)
        check_type("partition", self.partition, Partition, HOW_PARTITION)
        check_partition(self.partition, len(self.data))
        if isinstance(self.sampler, Available):
            self.sampler.check(len(self.partition))
        indices = self.partition.clients
        plan = RunPlan(
            method=self.method,
            num_clients=len(indices),
            counts=self.partition.sizes.tolist(),
            like=self.data.take(next((i for i in indices if len(i) > 1), indices[0])[:2]),
            batching=self.batching,
            per_round=self.per_round,
            precision=self.precision,
            chunk=self.chunk,
            augment=self.augment,
            name=self.name,
        )
        check_run(plan)
        check_labels(self.method.model, self.data)
        ids = able(plan)
        self.per_round = self.per_round or len(ids)
        place = ENGINES.get(self.engine) if isinstance(self.engine, str) else None
        self.clock = self._clock(is_elsewhere=isinstance(place, Elsewhere))
        setting = EngineSetting(
            split=self.method.model, like=plan.like, batch=self.batching.size, clients=self.per_round, chunk=self.chunk
        )
        self.job = Job(
            method=self.method,
            data=self.data,
            partition=self.partition,
            ids=ids,
            batching=self.batching,
            augment=self.augment,
            precision=self.precision,
            coders=coders(self.codecs, self.method.model, plan.like.x),
        )
        with computing(self.precision):
            if isinstance(place, Elsewhere):
                self.backend = place()(self.job, chosen_for_servers(self.server_engine, setting))
            else:
                self.backend = LocalBackend(self.job, chosen(self.engine, setting))
        super().__post_init__()

    def _clock(self, *, is_elsewhere: bool) -> Clock | None:
        if self.devices is None:
            return None
        num_devices, num_clients = len(self.devices.clients), len(self.partition)
        if num_devices < num_clients:
            raise ConfigError(f"there are {num_devices} devices for {num_clients} clients; give each client one")
        if is_elsewhere:
            log.warning("engine %s keeps no simulated clock", self.engine)
            return None
        return Clock(self.devices)


@dataclass(kw_only=True)
class Job:
    """What the clients compute, and on which samples."""

    method: Method
    data: Arrays
    partition: Partition
    ids: tuple[int, ...]  # the clients that can take part
    batching: Batching
    augment: Augmentation | None
    precision: Precision
    coders: Mapping[Kind, Coder]

    def names(self) -> dict[int, str]:
        return {j: self.partition.names[j] for j in self.ids}

    def counts(self) -> dict[int, int]:
        """Return the number of samples of each client."""
        return {j: len(self.partition.clients[j]) for j in self.ids}

    def samples_of(self, client: int) -> Arrays:
        return self.data.take(self.partition.clients[client])


class LocalBackend:
    """Runs all clients and both servers in this process, on one engine."""

    bridge = Bridge

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job, self.engine, self.memory, self.coders = job, engine, Memory(), job.coders
        self.names, self.samples_of, self.num_classes = job.names, job.samples_of, job.data.num_classes
        self.resolved = {"engine": engine.name}
        self._retries = False

    @property
    def name(self) -> str:
        return self.engine.name

    def drawn(self, round: int) -> None:
        return None

    def present(self, round: int) -> dict[int, int]:
        return self.job.counts()

    @contextmanager
    def attempt(self, round: int, key: int, samples: Mapping[int, int]) -> Iterator[Attempt]:
        if self._retries:
            release()
            self._retries = False
        clients = Local(
            engine=self.engine,
            data=self.job.data,
            index=self.job.partition.clients,
            kept=self.memory,
            key=key,
            augment=self.job.augment,
        )
        yield Attempt(clients, self.engine, self.engine)

    def recover(self, error: BaseException, attempt: int) -> None:
        self.engine = self.engine.recover(error, attempt)
        self._retries = True


def check_partition(partition: Partition, num_samples: int) -> None:
    """Refuse a partition without clients, and one of other data."""
    if not len(partition):
        raise PartitionError("the partition has no clients; deal the data to at least one")
    for name, index in zip(partition.names, partition.clients, strict=True):
        if len(index) and index.dtype.kind not in "iu":
            raise PartitionError(f"client {name} holds indices of type {index.dtype}; give the numbers of its samples")
        wrong = index[(index < 0) | (index >= num_samples)]
        if len(wrong):
            raise PartitionError(
                f"client {name} holds the index {wrong[0]}, but the data have the samples 0 to {num_samples - 1}; "
                "draw the partition from these data"
            )
