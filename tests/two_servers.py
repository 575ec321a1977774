"""A training server and a fed server that share nothing but messages, each in a thread, with clients between them."""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from in_process import device
from torch import Tensor

from cutlayer.batches import Batching
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.methods.base import Method
from cutlayer.remote.deployment import Deployment
from cutlayer.remote.messages import Message, Parcel, Work
from cutlayer.remote.office import Answered, Line, Office, PeerSaid
from cutlayer.remote.peer import Peer
from cutlayer.remote.session import Device, Session
from cutlayer.remote.trees import build
from cutlayer.state import State
from cutlayer.tree import Tree

SECONDS = 30.0


class Said(NamedTuple):
    """A message on its way to a server, with its tensors."""

    message: Message
    tensors: list[Tensor]
    kinds: tuple[str, ...] = ()  # of what a client sends


class Apart:
    """One client with a session at each server; `said` keeps all that each of them hears and says."""

    def __init__(self, train: Office, fed: Office, own: Device, said: dict[str, list[Said]]) -> None:
        self.said, self.own = said, own
        self.work: queue.SimpleQueue[tuple[Work, list[Tensor]]] = queue.SimpleQueue()
        self.parcels: queue.SimpleQueue[tuple[Parcel, list[Tensor]]] = queue.SimpleQueue()
        self.offices = {"train": train, "fed": fed}
        self.sessions = {name: office.new_session() for name, office in self.offices.items()}
        self.session = Session(own, self.sessions["train"], self._parcel)
        fed.join(self._line("fed", self.parcels))
        train.join(self._line("train", self.work))
        threading.Thread(target=self._run, daemon=True).start()

    def _line(self, server: str, box: Any) -> Line:
        def send(message: Message, tensors: Sequence[Tensor]) -> int:
            self.said[server].append(Said(message, list(tensors)))
            box.put((message, list(tensors)))
            return 0

        return Line(
            client=self.own.client,
            name=str(self.own.client),
            session=self.sessions[server],
            samples=len(self.own.data),
            kept=self.own.vault.statement(),
            send=send,
            close=lambda reason: None,
            commands=server == "train",
        )

    def _parcel(self, token: int, number: int) -> Tree:
        parcel, tensors = self.parcels.get(timeout=SECONDS)
        assert (parcel.token, parcel.number) == (token, number)
        return build(parcel.tree, iter(parcel.numbers).__next__, iter(tensors).__next__)

    def _run(self) -> None:
        while True:
            reply = self.session.work(*self.work.get())
            if reply is not None:
                server = "fed" if reply.to_fed else "train"
                message = msgspec.structs.replace(reply.message, session=self.sessions[server])
                self.said[server].append(Said(message, reply.tensors, tuple(reply.kinds)))
                self.offices[server].take(Answered(self.own.client, self.sessions[server], message, reply.tensors))


class Halves(NamedTuple):
    """What is left at each of the two servers, and all that went to and from it."""

    train: State
    fed: State
    deployments: dict[str, Deployment]
    said: dict[str, list[Said]]


def trained_apart(
    make: Callable[[], Method],
    data: Arrays,
    partition: Partition,
    *,
    batching: Batching,
    seed: int,
    rounds: int = 2,
) -> Halves:
    """Two rounds with two servers; everybody has a copy of the method, for two threads cannot run one module."""
    said: dict[str, list[Said]] = {"train": [], "fed": [], "peer": []}
    offices = {name: Office() for name in ("train", "fed")}
    peers = {"train": Peer("server"), "fed": Peer("fed")}
    for name, other in (("train", "fed"), ("fed", "train")):
        peers[name].notify = lambda message, office=offices[name]: office.take(PeerSaid(message))  # type: ignore[misc]

        def send(message: Message, tensors: Sequence[Tensor], to: Peer = peers[other]) -> None:
            said["peer"].append(Said(message, list(tensors)))
            to.took(message, list(tensors))

        peers[name].connected(send)
    for client in range(len(partition)):
        Apart(*offices.values(), device(make(), data, partition, batching, client), said)
    deployments = {
        name: Deployment(
            method=make(),
            office=offices[name],
            sample=data.take([0, 1]),
            batching=batching,
            seed=seed,
            gather=lambda _, name=name: tuple(offices[name].lines()),  # type: ignore[misc]
            deadline=SECONDS,
            patience=SECONDS,
            peer=peers[name],
        )
        for name in ("train", "fed")
    }
    states: dict[str, State] = {}
    errors: list[BaseException] = []

    def play(name: str) -> None:
        try:
            state = deployments[name].start()
            for _ in range(rounds):
                state = deployments[name].round(state)
            states[name] = state
        except BaseException as error:
            errors.append(error)
            for peer in peers.values():
                peer.gone(peer.meeting, str(error))

    threads = [threading.Thread(target=play, args=(name,)) for name in deployments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Halves(states["train"], states["fed"], deployments, said)
