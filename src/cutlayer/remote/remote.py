"""Clients that are somewhere else: each command waits in a queue, and `up` is the one that sends and waits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutlayer import tree
from cutlayer.batches import Walk
from cutlayer.calculus import Pullback
from cutlayer.engines.base import Fn, Ids
from cutlayer.engines.loop import Loop
from cutlayer.errors import WireError
from cutlayer.kinds import Kind, Parcel
from cutlayer.memory import check_kept
from cutlayer.program import Program
from cutlayer.reach import Brought
from cutlayer.remote.answers import checked
from cutlayer.remote.exchange import Deserted, Exchange
from cutlayer.remote.kept import Statements
from cutlayer.remote.messages import Refusal
from cutlayer.remote.office import Answered, Office, RoundId
from cutlayer.remote.parcels import Parcels
from cutlayer.remote.peer import Peer
from cutlayer.remote.queue import Letter, Queue, Ref
from cutlayer.remote.shadow import Shadow
from cutlayer.remote.watch import Nobody, Watcher
from cutlayer.tree import Tree
from cutlayer.values import Block, PerClient

__all__ = ["Deserted", "Remote"]


@dataclass(kw_only=True)
class Remote:
    """The clients of one attempt at a round."""

    office: Office
    program: Program
    shadow: Shadow
    kept: Statements
    round: RoundId
    ids: Ids
    deadline: float  # seconds that `up` waits
    num_classes: int | None = None
    device: str = "cpu"  # that this server computes on
    watcher: Watcher = field(default_factory=Nobody)
    peer: Peer | None = None  # the other server, if it is a process of its own

    def __post_init__(self) -> None:
        self._queues = {j: Queue(self.shadow) for j in self.ids}
        for j, line in self.office.lines().items():
            if j in self._queues and not line.noted and (self.peer is None or self.peer.commands):
                self.kept.joined(j, line.kept)
                line.noted = True
        self._local = Loop()
        self._number = 0  # of the last `up`
        self._parcels = Parcels(self.office, self.round.token)
        self._exchange = Exchange(
            office=self.office,
            round=self.round,
            ids=self.ids,
            deadline=self.deadline,
            kept=self.kept,
            read=self.read,
            watcher=self.watcher,
            peer=self.peer,
            resend=self._parcels.again,
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
        return self._local.keys(keys)

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        return self._local.seeds(keys)

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
        own, queue = value.at(j), self._queues[j]
        if self.peer is None or value.place != "fed":
            return queue.put(own)
        number = self._parcels.number(j)
        if self.peer.here == "fed":
            self.watcher.told(j, self._parcels.send(j, number, own))
            return queue.put(own)
        return queue.get(own, number)

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
        return self._queues[j].key(own) if isinstance(own, int) else self._queues[j].put(own)

    # -- the one statement that waits -------------------------------------------------------------------------------

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        home = parcels[0].kind.home or "server"
        self._number += 1
        delivery = self._number if self.peer is not None and home == "fed" else None
        letters = {
            j: self._queues[j].letter(list(parcels), [self._ref(p.value, j) for p in parcels], delivery)
            for j in self.alive(ids)
        }
        answered, came = self._exchange(letters, home)
        if self.peer is not None and self.peer.here != home:  # of values that are not here there are the shapes
            came = {j: [spec.tree() for _, spec in letters[j].expected] for j in answered}
        # In the order in which their values lay: sums over clients then round as they do on the loop engine.
        orders = [[j for b in p.value.blocks for j in b.ids if j in came] for p in parcels]
        return Brought(answered, [[_block(j, came[j][k]) for j in order] for k, order in enumerate(orders)])

    def read(self, letter: Letter, event: Answered) -> list[Tree]:
        """The values of an answer; WireError if they cannot be used."""
        answer = event.answer
        if isinstance(answer, Refusal):
            raise WireError(f"it refuses: {answer.where}: {answer.reason}")
        if answer.token != self.round.token:
            raise WireError("its answer is of another attempt at the round")
        values = checked(letter, answer.numbers, event.tensors, self.num_classes)
        return [tree.map(lambda a: a.to(self.device), value) for value in values]

    def finish(self) -> None:
        """The round is over: what clients are to keep of it is on its way to them, and nobody waits for that."""
        for j in self.alive(self.ids):
            line, letter = self.office.line(j), self._queues[j].rest()
            heard = self._exchange.heard.get(j)
            if letter is not None and line is not None and (line.session == heard or self.peer is not None):
                self.watcher.told(j, line.send(letter, self.round, begins=False)[1])
        self.office.flush()


@dataclass(frozen=True)
class RemoteMemory:
    """What some of the clients keep: the values stay with them, servers know the versions."""

    remote: Remote
    ids: Ids

    def versions(self, name: str) -> dict[int, int]:
        return self.remote.kept.versions(name, self.ids)

    def recall(self, name: str) -> PerClient:
        spec = {j: self.remote.kept.spec(name, self.remote.shadow) for j in self.versions(name)}
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
