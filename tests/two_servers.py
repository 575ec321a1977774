"""A training server and a fed server that share nothing but messages, each in a thread, with clients between them."""

import queue
import threading
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from in_process import device
from torch import Tensor

from cutlayer.core.batches import Batching
from cutlayer.core.codec import Coder
from cutlayer.core.kinds import Kind
from cutlayer.core.method import Method
from cutlayer.core.state import State
from cutlayer.core.tree import Tree
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.loop import Loop
from cutlayer.remote.device.session import ClientDevice, Session
from cutlayer.remote.protocol.commands import Deliver, Up
from cutlayer.remote.protocol.messages import Message, Sent, Work
from cutlayer.remote.server.deployment import DeviceBackend
from cutlayer.remote.server.peer import Peer
from cutlayer.remote.server.sessions import Answered, ClientSession, Sessions
from cutlayer.remote.tensors.trees import build
from cutlayer.runs.codecs import Codecs, coders
from cutlayer.runs.rounds import Rounds

SECONDS = 60.0


class Said(NamedTuple):
    """A message on its way to a server, with its tensors."""

    message: Message
    tensors: list[Tensor]
    kinds: tuple[str, ...] = ()  # of what a client sends


class Apart:
    """One client with a session at each server; `said` keeps all that each of them hears and says."""

    def __init__(self, train: Sessions, fed: Sessions, own: ClientDevice, said: dict[str, list[Said]]) -> None:
        self.said, self.own = said, own
        self.work: queue.SimpleQueue[tuple[Work, list[Tensor]]] = queue.SimpleQueue()
        self.fed_values: queue.SimpleQueue[tuple[Sent, list[Tensor]]] = queue.SimpleQueue()
        self.sessions = {"train": train, "fed": fed}
        self.numbers = {name: sessions.new_session() for name, sessions in self.sessions.items()}
        self.session = Session(own, self.numbers["train"], self._fed_value)
        fed.join(self._session("fed", self.fed_values))
        train.join(self._session("train", self.work))
        threading.Thread(target=self._run, daemon=True).start()

    def _session(self, server: str, box: Any) -> ClientSession:
        def send(message: Message, tensors: Sequence[Tensor]) -> int:
            self.said[server].append(Said(message, list(tensors)))
            box.put((message, list(tensors)))
            return 0

        return ClientSession(
            client=self.own.client,
            name=str(self.own.client),
            number=self.numbers[server],
            samples=len(self.own.data),
            kept=self.own.store.statement(),
            transmit=send,
            close=lambda reason: None,
            commands=server == "train",
        )

    def _fed_value(self, token: int, number: int) -> Tree:
        fed_value, tensors = self.fed_values.get(timeout=SECONDS)
        assert (fed_value.token, fed_value.number) == (token, number)
        return build(fed_value.tree, iter(fed_value.numbers).__next__, iter(tensors).__next__)

    def _run(self) -> None:
        kinds: dict[int, tuple[str, ...]] = {}  # by list: what its last command sends
        while True:
            work, tensors = self.work.get()
            if work.commands and isinstance(work.commands[-1], Up | Deliver):
                kinds[work.list] = work.commands[-1].kinds
            reply = self.session.work(work, tensors)
            if reply is not None:
                server = "fed" if reply.to_fed else "train"
                message = msgspec.structs.replace(reply.message, session=self.numbers[server])
                self.said[server].append(Said(message, reply.tensors, kinds[work.list]))
                self.sessions[server].take(Answered(self.own.client, self.numbers[server], message, reply.tensors))


class Halves(NamedTuple):
    """The state of each of the two servers, and all messages to and from it."""

    train: State
    fed: State
    deployments: dict[str, Rounds]
    said: dict[str, list[Said]]


def trained_apart(
    make: Callable[[], Method],
    data: Arrays,
    partition: Partition,
    *,
    batching: Batching,
    seed: int,
    rounds: int = 2,
    codecs: Codecs = MappingProxyType({}),
) -> Halves:
    """Two rounds with two servers; everybody has a copy of the method, for two threads cannot run one module."""
    said: dict[str, list[Said]] = {"train": [], "fed": [], "peer": []}
    sessions = {name: Sessions() for name in ("train", "fed")}
    peers = {"train": Peer("server"), "fed": Peer("fed")}
    for name, other in (("train", "fed"), ("fed", "train")):
        peers[name].notify = sessions[name].take

        def send(message: Message, tensors: Sequence[Tensor], to: Peer = peers[other]) -> None:
            said["peer"].append(Said(message, list(tensors)))
            to.took(message, list(tensors))

        peers[name].connected(send)

    def own(method: Method) -> dict[Kind, Coder]:
        return coders(codecs, method.model, data.take([0, 1]).x)

    for client in range(len(partition)):
        method = make()
        Apart(*sessions.values(), device(method, data, partition, batching, client, coders=own(method)), said)

    def rounds_of(name: str, method: Method) -> Rounds:
        made = own(method)
        backend = DeviceBackend(
            method=method,
            coders=made,
            sessions=sessions[name],
            sample=data.take([0, 1]),
            engine=Loop(),
            gather=lambda _: tuple(sessions[name].present()),
            deadline=SECONDS,
            peer=peers[name],
        )
        return Rounds(method, backend, batching=batching, seed=seed)

    deployments = {name: rounds_of(name, make()) for name in ("train", "fed")}
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
                peer.gone(peer.link_number, str(error))

    threads = [threading.Thread(target=play, args=(name,)) for name in deployments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return Halves(states["train"], states["fed"], deployments, said)
