"""Clients that are somewhere else: each command waits in a queue, and `up` is the one that sends and waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutlayer.core import tree
from cutlayer.core.batches import Walk
from cutlayer.core.calculus import Pullback
from cutlayer.core.engine import Engine, Fn, Ids
from cutlayer.core.kinds import Kind, Parcel, Place
from cutlayer.core.memory import check_kept
from cutlayer.core.program import Program
from cutlayer.core.transport import Brought
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient
from cutlayer.errors import WireError
from cutlayer.remote.monitor.watch import NoWatcher, Watcher
from cutlayer.remote.protocol.messages import Refusal
from cutlayer.remote.server.answers import checked
from cutlayer.remote.server.exchange import RoundExchange
from cutlayer.remote.server.fed_values import FedValues
from cutlayer.remote.server.known_versions import KnownVersions
from cutlayer.remote.server.peer import NoPeer, Peer
from cutlayer.remote.server.queue import Queue, Ref, Request
from cutlayer.remote.server.sessions import Answered, RoundId, Sessions
from cutlayer.remote.server.shape_runner import ShapeRunner


@dataclass(kw_only=True)
class Remote:
    """The clients of one attempt at a round."""

    sessions: Sessions
    program: Program
    shapes: ShapeRunner
    kept: KnownVersions
    round: RoundId
    ids: Ids
    deadline: float  # seconds that `up` waits
    num_classes: int | None = None
    device: str = "cpu"  # that this server computes on
    watcher: Watcher = field(default_factory=NoWatcher)
    peer: Peer | NoPeer = field(default_factory=NoPeer)  # the other server
    engines: Mapping[Place, Engine]  # that the servers compute on

    def __post_init__(self) -> None:
        self._queues = {j: Queue(self.shapes) for j in self.ids}
        for j, session in self.sessions.present().items():
            if j in self._queues and not session.noted and self.peer.commands:
                self.kept.joined(j, session.kept)
                session.noted = True
        self._keys: Mapping[int, int] = {}  # of the step
        self._number = 0  # of the last `up`
        self._fed_values = FedValues(self.sessions, self.round.token)
        self._exchange = RoundExchange(
            sessions=self.sessions,
            round=self.round,
            ids=self.ids,
            deadline=self.deadline,
            kept=self.kept,
            read=self.read,
            watcher=self.watcher,
            peer=self.peer,
            resend=self._fed_values.again,
        )

    # -- what the verbs ask for -----------------------------------------------------------------------------------

    def alive(self, ids: Ids) -> Ids:
        return tuple(j for j in ids if self._exchange.has(j))

    def load(self, walk: Walk, steps: Mapping[int, int], step_keys: Mapping[int, int]) -> tuple[PerClient, PerClient]:
        made = {
            j: self._queues[j].batch(walk.size(j), step, step_keys[j], walk.length(j, step))
            for j, step in steps.items()
        }
        x, y = ([_block(j, pair[k]) for j, pair in made.items()] for k in (0, 1))
        return PerClient("clients", x), PerClient("clients", y)

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        self._keys = keys
        return self.engines["server"].keys(keys)

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        return self.engines["server"].seeds(keys)

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        return PerClient("clients", [_block(j, self._queues[j].own(number)) for j in ids])

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        name = self.program.address(fn)
        return [_block(j, self._queues[j].do(name, self._refs(values, j))) for j in ids]

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        name = self.program.address(fn)
        made = {j: self._queues[j].vjp(name, self._refs(values, j)) for j in ids}
        return [_block(j, (out, Pullback(pull, (j,)))) for j, (out, pull) in made.items()]  # type: ignore[arg-type]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        name = self.program.address(fn)
        return [_block(j, self._queues[j].grad(name, self._refs(values, j), cut)) for j in ids]

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return [_block(j, self._queues[j].pull(pullbacks.at(j).pull, self._ref(gradient, j))) for j in pullbacks.ids]

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        return [_block(j, self._sent(j, value)) for j in value.ids]

    def _sent(self, j: int, value: PerClient) -> Ref:
        """What the fed server holds it sends itself, where it is a process of its own."""
        own, queue = self._real(value, j), self._queues[j]
        if not self.peer.apart or value.place != "fed":
            return queue.put(own)
        number = self._fed_values.number(j)
        if self.peer.has("fed"):
            self.watcher.told(j, self._fed_values.send(j, number, own))
            return queue.put(own)
        return queue.get(own, number)

    def _real(self, value: PerClient, j: int) -> Tree:
        """A client's row at a server, computed; a plain number comes from no server."""
        engine = self.engines.get(value.place)
        return value.at(j) if engine is None else engine.real(value.at(j))

    def memory(self, ids: Ids) -> "RemoteMemory":
        return RemoteMemory(self, ids)

    def queue(self, j: int) -> Queue:
        return self._queues[j]

    def _refs(self, values: Sequence[PerClient], j: int) -> list[Ref]:
        return [self._ref(v, j) for v in values]

    def _ref(self, value: PerClient, j: int) -> Ref:
        """A value at the client; what is known everywhere is told to it."""
        own = value.at(j)
        if isinstance(own, Ref):
            return own
        if own is None:  # a key, of which engines that stack clients have no use
            own = self._keys[j]
        return self._queues[j].key(own) if isinstance(own, int) else self._queues[j].put(own)

    # -- the one statement that waits -------------------------------------------------------------------------------

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        home = parcels[0].kind.home or "server"
        self._number += 1
        delivery = self._number if self.peer.apart and home == "fed" else None
        requests = {
            j: self._queues[j].request(list(parcels), [self._ref(p.value, j) for p in parcels], delivery)
            for j in self.alive(ids)
        }
        answered, came = self._exchange(requests, home)
        if not self.peer.has(home):  # of values that are not here there are the shapes
            came = {j: [spec.tree() for _, spec in requests[j].expected] for j in answered}
        # In the order in which their values lay: sums over clients then round as they do on the loop engine.
        orders = [[j for b in p.value.blocks for j in b.ids if j in came] for p in parcels]
        arrange = self.engines[home].arrange
        return Brought(answered, [arrange({j: came[j][k] for j in order}) for k, order in enumerate(orders)])

    def read(self, request: Request, event: Answered) -> list[Tree]:
        """The values of an answer; WireError if they cannot be used."""
        answer = event.answer
        if isinstance(answer, Refusal):
            raise WireError(f"it refuses: {answer.where}: {answer.reason}")
        if answer.token != self.round.token:
            raise WireError("its answer is of another attempt at the round")
        values = checked(request, answer.numbers, event.tensors, self.num_classes)
        return [tree.map(lambda a: a.to(self.device), value) for value in values]

    def finish(self) -> None:
        """The round is over: what clients are to keep of it is on its way to them, and nobody waits for that."""
        for j in self.alive(self.ids):
            session, request = self.sessions.get(j), self._queues[j].rest()
            heard = self._exchange.heard.get(j)
            if request is not None and session is not None and (session.number == heard or self.peer.apart):
                self.watcher.told(j, session.send(request, self.round, begins=False)[1])
        self.sessions.flush()


@dataclass(frozen=True)
class RemoteMemory:
    """What some of the clients keep: the values stay with them, servers know the versions."""

    remote: Remote
    ids: Ids

    def versions(self, name: str) -> dict[int, int]:
        return self.remote.kept.versions(name, self.ids)

    def recall(self, name: str) -> PerClient:
        spec = {j: self.remote.kept.spec(name, self.remote.shapes) for j in self.versions(name)}
        return PerClient("clients", [_block(j, self.remote.queue(j).recall(name, s)) for j, s in spec.items()])

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        check_kept(value)
        made = []
        for j in value.ids:
            if j in self.ids:
                ref = value.at(j)
                self.remote.kept.told(name, j, version, self.remote.round.token, ref.spec)
                made.append(_block(j, self.remote.queue(j).keep(name, ref, version)))
        return PerClient("clients", made)


def _block(j: int, value: Any) -> Block:
    return Block((j,), value, stacked=False)
