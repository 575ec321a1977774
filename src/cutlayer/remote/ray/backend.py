"""The backend `ray`: clients in workers of a Ray cluster, servers here.

Each worker is an actor with many virtual clients, which lives as long as the simulation. They are one's own, so they
are believed: an error at a client is an error of the run, and values that are not finite come up as on the loop engine.
"""

import logging
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cutlayer.core.engine import Engine
from cutlayer.core.method import TooFew
from cutlayer.core.program import Program
from cutlayer.core.servers import Bridge, Together
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError, CutlayerError, WireError
from cutlayer.remote.device.worker import WorkError
from cutlayer.remote.monitor.watch import NoWatcher
from cutlayer.remote.protocol.messages import Refusal
from cutlayer.remote.ray.cluster import CLUSTER
from cutlayer.remote.ray.dispatch import GONE, Dispatch, WorkerActor
from cutlayer.remote.ray.worker import ClientSetup, Worker, WorkerSamples
from cutlayer.remote.server.exchange import AllClientsLost
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.queue import Request
from cutlayer.remote.server.remote import Remote
from cutlayer.remote.server.sessions import Answered, RoundId
from cutlayer.remote.server.shape_runner import ShapeRunner
from cutlayer.remote.tensors.trees import filled
from cutlayer.runs.rounds import Attempt
from cutlayer.runs.simulation import Job

log = logging.getLogger("cutlayer")
FOREVER = 1e9  # seconds
ATTEMPTS = 3  # at a round in which every client is lost
SETTLE_SECONDS = 5.0  # that Ray may take to count CPUs as free which an earlier run has left


class RayBackend:
    """All clients of a simulation, dealt to workers in turn."""

    name = "ray"

    def __init__(self, job: Job, engine: Engine) -> None:
        data, partition = job.data, job.partition
        if data.y.device.type != "cpu":
            raise ConfigError(f"engine 'ray' computes on CPUs, but the data are on {data.y.device}; use device = cpu")
        self.job, self.engine = job, engine
        self.memory = KnownVersions()
        self._program = Program(job.method)
        self._shapes = ShapeRunner(self._program, data.take([0]))
        self._ray = CLUSTER.take()
        self._workers: list[WorkerActor] = []
        weakref.finalize(self, _dismiss, self._ray, self._workers)
        num = min(len(partition), _free_cpus(self._ray))
        make = self._ray.remote(Worker).options(num_cpus=1, max_restarts=-1)
        setup = ClientSetup(method=job.method, batching=job.batching, augment=job.augment, precision=job.precision)
        setup_there = self._ray.put(setup)
        for k in range(num):
            samples = WorkerSamples.of(data, {j: partition.clients[j] for j in range(k, len(partition), num)})
            self._workers.append(WorkerActor(make.remote(), setup_there, self._ray.put(samples)))

    @property
    def resolved(self) -> dict[str, str]:
        return {"engine": self.name, "server_engine": self.engine.name}

    @property
    def num_classes(self) -> int | None:
        return self.job.data.num_classes

    def names(self) -> dict[int, str]:
        return self.job.names()

    def samples_of(self, client: int) -> Arrays:
        return self.job.samples_of(client)

    def bridge(self) -> Bridge:
        return Together()

    def drawn(self, round: int) -> None:
        return None

    def present(self, round: int) -> dict[int, int]:
        return self.job.counts()

    @contextmanager
    def attempt(self, round: int, key: int, samples: Mapping[int, int]) -> Iterator[Attempt]:
        dispatch = Dispatch(self._ray, self._workers)
        dispatch.begin(samples)
        remote = TrustedClients(
            sessions=dispatch.sessions,
            program=self._program,
            shapes=self._shapes,
            kept=self.memory,
            round=RoundId.drawn(round, key),
            ids=tuple(samples),
            deadline=FOREVER,  # Ray tells of actors that die: nobody is waited for in vain
            watcher=LogWatcher(round, self.job.partition.names),
            engines={"server": self.engine, "fed": self.engine},
        )
        try:
            yield Attempt(remote, self.engine, self.engine)
            remote.finish()
        finally:
            dispatch.close()

    def recover(self, error: BaseException, attempt: int) -> None:
        if not isinstance(error, AllClientsLost | TooFew):
            self.engine = self.engine.recover(error, attempt)
        elif attempt < ATTEMPTS:
            self.engine.forget()
            log.warning("%s; it is tried again", error)
        else:
            raise CutlayerError(f"{error}, {ATTEMPTS} times; Ray's own logs may tell why") from None


class TrustedClients(Remote):
    """Clients of one's own: nothing that they send is doubted, and what goes wrong at one of them ends the run."""

    def read(self, request: Request, event: Answered) -> list[Tree]:
        answer = event.answer
        if isinstance(answer, Refusal):
            if answer.where == GONE:
                raise WireError(f"{GONE} is gone: {answer.reason}")
            raise WorkError(f"client {event.client}, {answer.where}", answer.reason)
        number, tensor = iter(answer.numbers).__next__, iter(event.tensors).__next__
        return [filled(flat.structure, number, tensor) for _, flat in request.expected]


class LogWatcher(NoWatcher):
    """Says who is out of a round, of each client once."""

    def __init__(self, number: int, names: tuple[str, ...]) -> None:
        self._number, self._names = number, names
        self._told: set[int] = set()

    def lost(self, number: int, reason: str) -> None:
        if number in self._told:
            return
        self._told.add(number)
        log.warning("client %s is out of round %d: %s", self._names[number], self._number + 1, reason)

    refused = lost


def _free_cpus(ray: Any) -> int:
    """CPUs that an actor can have."""
    end = time.monotonic() + SETTLE_SECONDS
    while (free := _cpus(ray.available_resources())) < _cpus(ray.cluster_resources()) and time.monotonic() < end:
        time.sleep(0.05)
    if not free:
        raise ConfigError("no CPU of the Ray cluster is free; wait for what runs there, or start Ray with more of them")
    return free


def _cpus(resources: Mapping[str, float]) -> int:
    return int(resources.get("CPU", 0))


def _dismiss(ray: Any, workers: list[WorkerActor]) -> None:
    if ray.is_initialized():  # it may have been shut down by whoever started it
        for worker in workers:
            ray.kill(worker.actor)
    CLUSTER.give_back()
