"""The backend `ray`: clients in workers of a Ray cluster, servers in this process.

Each worker is an actor with many virtual clients and lives as long as the simulation. The clients are trusted: an error
at a client is an error of the run, and values that are not finite come up as on the loop engine.
"""

import logging
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cutlayer import plugins
from cutlayer.core.engine import Engine
from cutlayer.core.method import TooFew
from cutlayer.core.program import Program
from cutlayer.core.servers import Bridge
from cutlayer.core.tree import Tree
from cutlayer.errors import ConfigError, CutlayerError, WireError
from cutlayer.remote.device.session import ClientDevice
from cutlayer.remote.device.worker import WorkError
from cutlayer.remote.monitor.watch import NoWatcher
from cutlayer.remote.protocol.messages import Refusal
from cutlayer.remote.ray.cluster import CLUSTER
from cutlayer.remote.ray.dispatch import GONE, Dispatch, WorkerActor
from cutlayer.remote.ray.worker import Worker, WorkerSamples
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
SETTLE_SECONDS = 5.0  # Ray may take this long to free the CPUs of an earlier run


class RayBackend:
    """All clients of a simulation, dealt to the workers in turn."""

    name = "ray"
    bridge = Bridge

    def __init__(self, job: Job, engine: Engine) -> None:
        data, partition = job.data, job.partition
        if data.y.device.type != "cpu":
            raise ConfigError(f"engine 'ray' computes on CPUs, but the data are on {data.y.device}; use device = cpu")
        self.job, self.engine, self.memory, self.coders = job, engine, KnownVersions(), job.coders
        self.names, self.samples_of, self.num_classes = job.names, job.samples_of, data.num_classes
        self.resolved = {"engine": self.name, "server_engine": engine.name}
        self._losses = 0  # attempts at this round in which every client was lost
        self._program = Program(job.method, job.coders)
        self._shapes = ShapeRunner(self._program, data.take([0]))
        self._ray = CLUSTER.take()
        self._workers: list[WorkerActor] = []
        weakref.finalize(self, _dismiss, self._ray, self._workers).atexit = False  # then Ray ends the actors itself
        num = min(len(partition), _free_cpus(self._ray))
        make = self._ray.remote(Worker).options(num_cpus=1, max_restarts=-1)
        new_device = partial(
            ClientDevice, program=self._program, batching=job.batching, augment=job.augment, precision=job.precision
        )
        paths = [path or str(Path.cwd()) for path in sys.path]
        files = [str(path) for path in plugins.LOADED]
        common = self._ray.put(new_device)
        for k in range(num):
            samples = WorkerSamples.of(data, {j: partition.clients[j] for j in range(k, len(partition), num)})
            self._workers.append(WorkerActor(make.remote(paths, files), [common, self._ray.put(samples)]))

    def drawn(self, round: int) -> None:
        return None

    def present(self, round: int) -> dict[int, int]:
        return self.job.counts()

    @contextmanager
    def attempt(self, round: int, key: int, samples: Mapping[int, int]) -> Iterator[Attempt]:
        dispatch = Dispatch(self._ray, self._workers)
        try:
            dispatch.begin(samples)
            remote = TrustedClients(
                sessions=dispatch.sessions,
                program=self._program,
                shapes=self._shapes,
                kept=self.memory,
                round=RoundId.drawn(round, key),
                ids=tuple(samples),
                deadline=FOREVER,  # Ray reports actors that die, so no wait is in vain
                watcher=LogWatcher(round, self.job.partition.names),
                engines={"server": self.engine, "fed": self.engine},
            )
            yield Attempt(remote, self.engine, self.engine)
            remote.finish()
        finally:
            dispatch.close()

    def recover(self, error: BaseException, attempt: int) -> None:
        """Retry a round in which every client was lost, but not for ever; retries of the engine do not count."""
        if attempt == 1:
            self._losses = 0
        if not isinstance(error, AllClientsLost | TooFew):
            self.engine = self.engine.recover(error, attempt)
            return
        self._losses += 1
        if self._losses == ATTEMPTS:
            raise CutlayerError(f"{error}, {ATTEMPTS} times; Ray's own logs may tell why") from None
        self.engine.forget()
        log.warning("%s; it is tried again", error)


class TrustedClients(Remote):
    """Clients of this run's own: their answers are not checked, and an error at one of them ends the run."""

    def read(self, request: Request, event: Answered) -> list[Tree]:
        answer = event.answer
        if isinstance(answer, Refusal):
            if answer.where == GONE:
                raise WireError(f"{GONE} is gone: {answer.reason}")
            raise WorkError(f"client {event.client}, {answer.where}", answer.reason)
        number, tensor = iter(answer.numbers).__next__, iter(event.tensors).__next__
        return [filled(flat.structure, number, tensor) for _, flat in request.expected]


class LogWatcher(NoWatcher):
    """Logs each client that is out of a round, once."""

    def __init__(self, number: int, names: tuple[str, ...]) -> None:
        self._number, self._left = number, dict(enumerate(names))

    def lost(self, number: int, reason: str) -> None:
        if number in self._left:
            log.warning("client %s is out of round %d: %s", self._left.pop(number), self._number + 1, reason)

    refused = lost


def _free_cpus(ray: Any) -> int:
    """Return how many CPUs of the cluster actors can have."""
    end = time.monotonic() + SETTLE_SECONDS
    free, all_of_them = ray.available_resources, ray.cluster_resources
    while free().get("CPU", 0) < all_of_them().get("CPU", 0) and time.monotonic() < end:
        time.sleep(0.05)
    if not (num := int(free().get("CPU", 0))):
        raise ConfigError("no CPU of the Ray cluster is free; wait for what runs there, or start Ray with more of them")
    return num


def _dismiss(ray: Any, workers: list[WorkerActor]) -> None:
    if ray.is_initialized():  # whoever started Ray may have shut it down
        for worker in workers:
            ray.kill(worker.actor)
    CLUSTER.give_back()
