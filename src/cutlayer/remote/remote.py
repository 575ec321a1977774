"""Clients that are somewhere else: each command waits in a queue, and `up` is the one that sends and waits.

A client that is lost has finished early; `up` returns those that answered. One that is lost before it has answered
anything in this round may come back until the deadline, and is then asked again from the beginning.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cutlayer.batches import Walk
from cutlayer.calculus import Pullback
from cutlayer.engines.base import Fn, Ids
from cutlayer.engines.loop import Loop
from cutlayer.errors import CutlayerError, WireError
from cutlayer.kinds import Kind, Parcel
from cutlayer.memory import check_kept
from cutlayer.program import Program
from cutlayer.reach import Brought
from cutlayer.remote.answers import checked
from cutlayer.remote.kept import Statements
from cutlayer.remote.messages import Refusal
from cutlayer.remote.office import Answered, Joined, Lost, Office, RoundId
from cutlayer.remote.queue import Letter, Queue, Ref
from cutlayer.remote.shadow import Shadow
from cutlayer.remote.watch import Nobody, Watcher
from cutlayer.tree import Tree
from cutlayer.values import Block, PerClient


class Deserted(CutlayerError):
    """Every client of a round is lost: the round did not happen."""


@dataclass
class Waiting:
    """A client that owes an answer."""

    letter: Letter
    session: int
    number: int
    since: float


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
    watcher: Watcher = field(default_factory=Nobody)
    lost: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._queues = {j: Queue(self.shadow) for j in self.ids}
        self._heard: dict[int, int] = {}  # the sessions of those that have answered in this round
        for j, line in self.office.lines().items():
            if j in self._queues and not line.noted:
                self.kept.joined(j, line.kept)
                line.noted = True
        self._held = {j: self.kept.held(j) for j in self.ids}  # when the round began
        self._local = Loop()

    # -- what the verbs ask for -----------------------------------------------------------------------------------

    def alive(self, ids: Ids) -> Ids:
        return tuple(j for j in ids if j not in self.lost)

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
        return [_block(j, self._queues[j].put(value.at(j))) for j in value.ids]

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
        letters = {
            j: self._queues[j].letter(list(parcels), [self._ref(p.value, j) for p in parcels]) for j in self.alive(ids)
        }
        waiting: dict[int, Waiting] = {}
        for j, letter in letters.items():
            self._post(j, letter, waiting)
        self.office.flush()
        came: dict[int, list[Tree]] = {}
        end = time.monotonic() + self.deadline
        while waiting and (left := end - time.monotonic()) > 0:
            match self.office.receive(left):
                case Answered() as event:
                    self._answered(event, waiting, came)
                case Lost() as event:
                    self._gone(event, waiting)
                case Joined(client):
                    self._back(client, waiting)
        for j in waiting:
            self._lose(j, f"it gave no answer within {self.deadline:g} seconds")
        if not self.alive(self.ids):
            raise Deserted(f"round {self.round.number + 1}: every client is lost")
        answered = tuple(j for j in ids if j in came)
        # In the order in which their values lay: sums over clients then round as they do on the loop engine.
        orders = [[j for b in p.value.blocks for j in b.ids if j in came] for p in parcels]
        return Brought(answered, [[_block(j, came[j][k]) for j in order] for k, order in enumerate(orders)])

    def finish(self) -> None:
        """The round is over: what clients are to keep of it is on its way to them, and nobody waits for that."""
        for j in self.alive(self.ids):
            line, letter = self.office.line(j), self._queues[j].rest()
            if letter is not None and line is not None and line.session == self._heard.get(j):
                self.watcher.told(j, line.send(letter, self.round, begins=False)[1])
        self.office.flush()

    def _post(self, j: int, letter: Letter, waiting: dict[int, Waiting]) -> None:
        line, now = self.office.line(j), time.monotonic()
        if j in self._heard and (line is None or line.session != self._heard[j]):
            self._lose(j, "it was lost in the middle of the round")
        elif line is None:
            waiting[j] = Waiting(letter, -1, -1, now)  # it may be back before the deadline
        else:
            number, size = line.send(letter, self.round, begins=j not in self._heard)
            waiting[j] = Waiting(letter, line.session, number, now)
            self.watcher.asked(j, size)

    def _answered(self, event: Answered, waiting: dict[int, Waiting], came: dict[int, list[Tree]]) -> None:
        j, answer = event.client, event.answer
        asked = waiting.get(j)
        if asked is None or (asked.session, asked.number) != (event.session, answer.number):
            return  # late, or twice
        del waiting[j]
        try:
            came[j] = self._checked(asked.letter, event)
        except WireError as error:
            self._lose(j, str(error), refused=True)
            return
        self._heard[j] = event.session
        self.watcher.answered(j, event.size, time.monotonic() - asked.since)

    def _checked(self, letter: Letter, event: Answered) -> list[Tree]:
        if isinstance(event.answer, Refusal):
            raise WireError(f"it refuses: {event.answer.where}: {event.answer.reason}")
        return checked(letter, event.answer.numbers, event.tensors, self.num_classes)

    def _gone(self, event: Lost, waiting: dict[int, Waiting]) -> None:
        """One that has been heard in this round is lost; any other may come back until the deadline."""
        j = event.client
        if j not in self._queues or j in self.lost:
            return
        self.watcher.lost(j, event.reason)
        if self._heard.get(j) == event.session:
            waiting.pop(j, None)
            self._lose(j, event.reason)

    def _back(self, j: int, waiting: dict[int, Waiting]) -> None:
        """A client that has answered nothing yet is asked again, if it holds what it held when the round began."""
        line, asked = self.office.line(j), waiting.get(j)
        if line is None or asked is None or asked.session == line.session:
            return
        stated = self.kept.fork()
        stated.joined(j, line.kept)
        if j in self._heard or stated.held(j) != self._held[j]:
            waiting.pop(j)
            self.lost.add(j)  # but it may stay for the next round
            return
        line.noted = True
        self._post(j, asked.letter, waiting)
        self.office.flush()

    def _lose(self, j: int, reason: str, *, refused: bool = False) -> None:
        """The client is out of this round; its session ends, so that it joins the next one afresh."""
        self.lost.add(j)
        (self.watcher.refused if refused else self.watcher.lost)(j, reason)
        line = self.office.line(j)
        if line is not None:
            self.office.leave(j, line.session, reason)


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
