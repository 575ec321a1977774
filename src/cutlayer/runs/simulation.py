"""A method in simulation: all clients of a partition on this machine, or in the workers of a Ray cluster."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from cutlayer.core.batches import Batching
from cutlayer.core.checks import check_type
from cutlayer.core.engine import Engine
from cutlayer.core.memory import Memory
from cutlayer.core.meter import Meter
from cutlayer.core.method import Method
from cutlayer.core.precision import Precision, computing
from cutlayer.core.servers import Bridge
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment
from cutlayer.data.partition import Partition
from cutlayer.engines.auto import ENGINES, Elsewhere, EngineSetting, chosen, chosen_for_servers
from cutlayer.engines.local import Local
from cutlayer.engines.out_of_memory import release
from cutlayer.errors import ConfigError, PartitionError
from cutlayer.meters.clock import Clock
from cutlayer.pieces.sampler import Sampler, uniform
from cutlayer.planning.devices import Devices
from cutlayer.runs.checks import RunPlan, able, check_run
from cutlayer.runs.rounds import Attempt, Backend, Rounds

log = logging.getLogger("cutlayer")
HOW_ARRAYS = "as cutlayer.from_arrays, from_dataset or load make them"


class Simulation(Rounds):
    """Rounds with all clients of a partition."""

    def __init__(
        self,
        method: Method,
        data: Arrays,
        partition: Partition,
        *,
        batching: Batching = Batching(),
        per_round: int | None = None,
        sampler: Sampler = uniform,
        engine: str | Engine = "auto",
        server_engine: str | Engine = "auto",
        chunk: int | None = None,
        seed: int = 0,
        precision: Precision = "fp32",
        meters: Sequence[Meter] = (),
        devices: Devices | None = None,
        augment: Augment | None = None,
        name: str = "",
    ) -> None:
        check_type("data", data, Arrays, HOW_ARRAYS)
        check_type("partition", partition, Partition, "as cutlayer.iid, dirichlet, shards or natural draw one")
        _check_partition(partition, len(data))
        plan = RunPlan(
            method=method,
            num_clients=len(partition),
            counts=partition.sizes.tolist(),
            like=data.take(next((i for i in partition.clients if len(i) > 1), partition.clients[0])[:2]),
            batching=batching,
            per_round=per_round,
            precision=precision,
            chunk=chunk,
            augment=augment,
            name=name,
        )
        check_run(plan)
        clock = None if devices is None else Clock(_checked_devices(devices, len(partition)))
        if clock is not None and isinstance(engine, str) and isinstance(ENGINES.get(engine), Elsewhere):
            log.warning("engine %s keeps no simulated clock", engine)
            clock = None
        ids = able(plan)
        setting = EngineSetting(
            split=method.model, like=plan.like, batch=batching.size, clients=per_round or len(ids), chunk=chunk
        )
        self.job = Job(method, data, partition, ids, batching, augment, precision)
        with computing(precision):
            backend = _backend(self.job, engine, server_engine, setting)
        super().__init__(
            method,
            backend,
            batching=batching,
            per_round=per_round or len(ids),
            sampler=sampler,
            seed=seed,
            precision=precision,
            meters=meters,
            clock=clock,
        )


@dataclass
class Job:
    """What clients compute, and on which samples."""

    method: Method
    data: Arrays
    partition: Partition
    ids: tuple[int, ...]  # of the clients that can take part
    batching: Batching
    augment: Augment | None
    precision: Precision

    def names(self) -> dict[int, str]:
        return {j: self.partition.names[j] for j in self.ids}

    def counts(self) -> dict[int, int]:
        """Of their samples."""
        return {j: len(self.partition.clients[j]) for j in self.ids}

    def samples_of(self, client: int) -> Arrays:
        return self.data.take(self.partition.clients[client])


def _backend(job: Job, engine: str | Engine, server_engine: str | Engine, setting: EngineSetting) -> Backend:
    place = ENGINES.get(engine) if isinstance(engine, str) else None
    if isinstance(place, Elsewhere):
        elsewhere: Callable[[Job, Engine], Backend] = place()
        return elsewhere(job, chosen_for_servers(server_engine, setting))
    return LocalBackend(job, chosen(engine, setting))


class LocalBackend:
    """All clients in this process, computed by one engine together with both servers."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job, self.engine = job, engine
        self.memory = Memory()
        self._retries = False

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def resolved(self) -> dict[str, str]:
        return {"engine": self.engine.name}

    @property
    def num_classes(self) -> int | None:
        return self.job.data.num_classes

    def names(self) -> dict[int, str]:
        return self.job.names()

    def samples_of(self, client: int) -> Arrays:
        return self.job.samples_of(client)

    def bridge(self) -> Bridge:
        return Bridge()

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


def _checked_devices(devices: Devices, num_clients: int) -> Devices:
    if len(devices.clients) < num_clients:
        raise ConfigError(f"there are {len(devices.clients)} devices for {num_clients} clients; give each client one")
    return devices
