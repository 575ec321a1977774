"""The engine `ray`: servers compute here, as on the loop engine, and the clients in actors of a Ray cluster.

Each actor is a crew of many virtual clients, which lives as long as the simulation. They are one's own, so they are
believed: an error at a client is an error of the run, and values that are not finite come up as on the loop engine.
"""

import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.base import Ids
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError, CutlayerError, WireError
from cutlayer.methods.base import TooFew
from cutlayer.program import Program
from cutlayer.remote.crew import Host, Kit, Share
from cutlayer.remote.kept import Statements
from cutlayer.remote.messages import Refusal
from cutlayer.remote.office import Answered, RoundId
from cutlayer.remote.post import GONE, Manned, Post
from cutlayer.remote.queue import Letter
from cutlayer.remote.ray_cluster import CLUSTER
from cutlayer.remote.remote import Deserted, Remote
from cutlayer.remote.shadow import Shadow
from cutlayer.remote.trees import build
from cutlayer.remote.watch import Nobody
from cutlayer.remote.worker import Trouble
from cutlayer.state import State
from cutlayer.tree import Tree

log = logging.getLogger("cutlayer")
FOREVER = 1e9  # seconds
ATTEMPTS = 3  # at a round in which every client is lost
SETTLE_SECONDS = 5.0  # that Ray may take to count CPUs as free which an earlier run has left


class Fleet(Loop):
    """All clients of a simulation, dealt to crews in turn."""

    name = "ray"

    def __init__(self, kit: Kit, program: Program, data: Arrays, partition: Partition) -> None:
        if data.y.device.type != "cpu":
            raise ConfigError(f"engine 'ray' computes on CPUs, but the data are on {data.y.device}; use device = cpu")
        self.memory = Statements()
        self._program, self._shadow = program, Shadow(program, data.take([0]))
        self._sizes, self._names = partition.sizes.tolist(), partition.names
        self._ray = CLUSTER.take()
        self._crews: list[Manned] = []
        weakref.finalize(self, _dismiss, self._ray, self._crews)
        num = min(len(partition), _free_cpus(self._ray))
        make = self._ray.remote(Host).options(num_cpus=1, max_restarts=-1)
        kit_there = self._ray.put(kit)
        for k in range(num):
            share = Share.of(data, {j: partition.clients[j] for j in range(k, len(partition), num)})
            self._crews.append(Manned(make.remote(), kit_there, self._ray.put(share)))

    def round(self, number: int, key: int, ids: Ids, play: Callable[[Remote], State]) -> State:
        """What `play` makes of the way to these clients; a round in which all of them are lost is tried again."""
        for _ in range(ATTEMPTS):
            post, kept = Post(self._ray, self._crews), self.memory.fork()
            post.meet({j: self._sizes[j] for j in ids})
            remote = Believing(
                office=post.office,
                program=self._program,
                shadow=self._shadow,
                kept=kept,
                round=RoundId.drawn(number, key),
                ids=ids,
                deadline=FOREVER,  # Ray tells of actors that die: nobody is waited for in vain
                watcher=Telling(number, self._names),
            )
            try:
                after = play(remote)
                remote.finish()
            except (Deserted, TooFew) as error:
                log.warning("%s; it is tried again", error)
                continue
            finally:
                post.close()
            self.memory = kept
            return after
        raise CutlayerError(f"round {number + 1}: every client was lost {ATTEMPTS} times; Ray's own logs may tell why")


class Believing(Remote):
    """Clients of one's own: nothing that they send is doubted, and what goes wrong at one of them ends the run."""

    def read(self, letter: Letter, event: Answered) -> list[Tree]:
        answer = event.answer
        if isinstance(answer, Refusal):
            if answer.where == GONE:
                raise WireError(f"{GONE} is gone: {answer.reason}")
            raise Trouble(f"client {event.client}, {answer.where}", answer.reason)
        number, tensor = iter(answer.numbers).__next__, iter(event.tensors).__next__
        return [build(flat.skeleton, number, tensor) for _, flat in letter.expected]


class Telling(Nobody):
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


def _dismiss(ray: Any, crews: list[Manned]) -> None:
    if ray.is_initialized():  # it may have been shut down by whoever started it
        for crew in crews:
            ray.kill(crew.actor)
    CLUSTER.give_back()
