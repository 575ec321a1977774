"""The transport to clients in other processes: commands wait in queues until `up` sends them and waits for answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from cutlayer.engines.base import one_by_one
from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import Refusal
from cutlayer.remote.server.answers import checked
from cutlayer.remote.server.exchange import ItRefuses, RoundExchange
from cutlayer.remote.server.queue import Queue, Ref, Request
from cutlayer.remote.server.sessions import Answered
from cutlayer.remote.server.shape_runner import ShapeRunner


@dataclass(kw_only=True)
class Remote(RoundExchange):
    """The clients of one attempt at a round."""

    program: Program
    shapes: ShapeRunner
    num_classes: int | None = None
    device: str = "cpu"  # that this server computes on
    engines: Mapping[Place, Engine]  # that the servers compute on

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queues = {j: Queue(self.shapes) for j in self.ids}
        self._step = 0  # of the round, from which clients derive their keys

    # -- the verbs -------------------------------------------------------------------------------------------------

    def load(
        self, walk: Walk, steps: Mapping[int, int], number: int, step_keys: Mapping[int, int]
    ) -> tuple[PerClient, PerClient]:
        self._step = number
        made = {j: self.queues[j].batch(walk.size(j), step, number, walk.length(j, step)) for j, step in steps.items()}
        x, y = (PerClient("clients", one_by_one({j: pair[k] for j, pair in made.items()})) for k in (0, 1))
        return x, y

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return self.engines["server"].keys(keys)

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        return PerClient("clients", one_by_one({j: self.queues[j].own(number) for j in ids}))

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        name = self.program.address(fn)
        return one_by_one({j: self.queues[j].do(name, self._refs(values, j)) for j in ids})

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        name = self.program.address(fn)
        made = {j: self.queues[j].vjp(name, self._refs(values, j)) for j in ids}
        return one_by_one({j: (out, Pullback(pull, (j,))) for j, (out, pull) in made.items()})  # type: ignore[arg-type]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        name = self.program.address(fn)
        return one_by_one({j: self.queues[j].grad(name, self._refs(values, j), cut) for j in ids})

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return one_by_one({j: self.queues[j].pull(pullbacks.at(j).pull, self._ref(gradient, j)) for j in pullbacks.ids})

    def down(self, kind: Kind, value: PerClient) -> list[Block]:
        return one_by_one({j: self._sent(j, value) for j in value.ids})

    def _sent(self, j: int, value: PerClient) -> Ref:
        """Send a value to a client; a separate fed server sends its values itself."""
        own, queue = self._real(value, j), self.queues[j]
        if not self.peer.separate(value.place):
            return queue.put(own)
        number = self.fed_values.add(j, own)
        if not self.peer.has(value.place):
            return queue.get(own, number)
        self.watcher.sent(j, self.fed_values.send(j))
        return queue.put(own)

    def _real(self, value: PerClient, j: int) -> Tree:
        """Return a client's row at a server, computed; a plain number comes from no server."""
        engine = self.engines.get(value.place)
        return value.at(j) if engine is None else engine.real(value.at(j))

    def memory(self, ids: Ids) -> "RemoteMemory":
        return RemoteMemory(self, ids)

    def _refs(self, values: Sequence[PerClient], j: int) -> list[Ref]:
        return [self._ref(v, j) for v in values]

    def _ref(self, value: PerClient, j: int) -> Ref:
        """Return a client's handle of a value; send it the value if it has none."""
        own = value.at(j)
        if isinstance(own, Ref):
            return own
        return self.queues[j].key(self._step) if value.place == "anywhere" else self.queues[j].put(own)

    # -- the only verb that waits ----------------------------------------------------------------------------------

    def up(self, parcels: Sequence[Parcel], ids: Ids) -> Brought:
        home = parcels[0].kind.home or "server"
        self._number += 1
        delivery = self._number if self.peer.separate(home) else None
        requests = {
            j: self.queues[j].request(list(parcels), [self._ref(p.value, j) for p in parcels], delivery)
            for j in self.alive(ids)
        }
        answered, came = self.ask(requests, home)
        if not self.peer.has(home):  # the values are at the other server; this one has their shapes
            came = {j: [spec.tree() for _, spec in requests[j].expected] for j in answered}
        # In the order of the values' blocks: sums over clients then round as on the loop engine.
        orders = [[j for b in p.value.blocks for j in b.ids if j in came] for p in parcels]
        arrange = self.engines[home].arrange
        return Brought(answered, [arrange({j: came[j][k] for j in order}) for k, order in enumerate(orders)])

    def read(self, request: Request, event: Answered) -> list[Tree]:
        answer = event.answer
        if isinstance(answer, Refusal):
            raise ItRefuses(f"it refuses: {answer.where}: {answer.reason}")
        if answer.token != self.round.token:
            raise WireError("its answer is of another attempt at the round")
        values = checked(request, answer.numbers, event.tensors, self.num_classes, self.program.coders)
        return [tree.map(lambda a: a.to(self.device), value) for value in values]

    def finish(self) -> None:
        """Tell the clients what to keep of this round; nobody waits for them to do so."""
        for j in self.alive(self.ids):
            session, request = self.sessions.get(j), self.queues[j].rest()
            if request and session and (session.number == self.heard.get(j) or self.peer.apart):
                self.watcher.sent(j, session.send(request, self.round, begins=False)[1])
        self.sessions.flush()


@dataclass(frozen=True)
class RemoteMemory:
    """The values that some clients keep: clients hold the values, servers know the versions."""

    remote: Remote
    ids: Ids

    def versions(self, name: str) -> dict[int, int]:
        return self.remote.kept.versions(name, self.ids)

    def recall(self, name: str) -> PerClient:
        kept, shapes, queues = self.remote.kept, self.remote.shapes, self.remote.queues
        made = {j: queues[j].recall(name, kept.spec(name, j, shapes)) for j in self.versions(name)}
        return PerClient("clients", one_by_one(made))

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        check_kept(value)
        refs = {j: value.at(j) for j in value.ids if j in self.ids}
        for j, ref in refs.items():
            self.remote.kept.told(name, j, version, self.remote.round.token, ref.spec)
        made = {j: self.remote.queues[j].keep(name, ref, version) for j, ref in refs.items()}
        return PerClient("clients", one_by_one(made))
