"""Plays rounds with a method on tensors without content, and records what one client is asked."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.batches import Walk
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.servers import Bridge
from cutlayer.core.sums import Weights
from cutlayer.core.tree import Tree
from cutlayer.core.values import PerClient
from cutlayer.meters.clock import identity
from cutlayer.remote.device.conversation import BY_SAMPLE, Line, Reader, form_of
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.server.peer import NoPeer
from cutlayer.remote.server.queue import Ref, Request
from cutlayer.remote.server.remote import Remote
from cutlayer.remote.server.shape_engine import ShapeEngine
from cutlayer.remote.server.shape_runner import signature


class Understudy(ShapeEngine):
    """The engine of both servers in a rehearsal: whatever gives values of known shapes is computed once."""

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        return self._once(("once", identity(fn), tuple(map(signature, values))), partial(_shaped, fn), *values)

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        """Return what all rows have in common: a sum or a mean has no other shape."""
        first = rows.blocks[0]
        return tree.map(partial(_combined, largest_integers=largest_integers), first.row(first.ids[0]))


def _shaped(fn: Fn, *values: Any) -> Any:
    """Run a function on shapes; if it brings values of its own, on zeros."""
    try:
        return fn(*values)
    except RuntimeError:
        return tree.shapes(fn(*(tree.zeros(v) for v in values)))


def _combined(a: Tensor, *, largest_integers: bool) -> Tensor:
    dtype = a.dtype if a.is_floating_point() or largest_integers else torch.float64
    return torch.empty(a.shape, dtype=dtype, device="meta")


class ShapesBridge(Bridge):
    """Between two servers of which only shapes are known here; what steers a round is played as ones."""

    def kept(self, place: Place, value: Tree) -> Tree:
        return tree.shapes(value)

    def looked(self, place: Place, value: Tree) -> Tree:
        return tree.map(lambda a: torch.ones(a.shape, dtype=a.dtype), value)


class Absent(NoPeer):
    """Both servers are somewhere else, as one process or as two."""

    apart = True

    def __init__(self, two_servers: bool) -> None:
        self._two = two_servers

    def has(self, place: Place) -> bool:
        return False

    def separate(self, place: Place) -> bool:
        return self._two and place == "fed"


WITH_NOTE = (c.Put, c.Get, c.Batch)
NO_NOTE: tuple[str, Any] = ("", None)


@dataclass
class Heard:
    """What one client was asked in a round."""

    round: int = 0
    lines: list[Line] = field(default_factory=list)
    forms: list[tuple[str, Any]] = field(default_factory=list)  # kind and form of each value that came down
    leaves: list[tuple[str, Any]] = field(default_factory=list)  # and of each that goes up
    settings: list[Any] = field(default_factory=list)  # plain numbers that came down
    steps: list[int] = field(default_factory=list)  # the number of each mini-batch
    seeds: Counter[int] = field(default_factory=Counter)  # of the client alone, by number
    slots: int = 0  # that held values at a time
    up: int = 0  # bytes of all answers
    header: int = 0  # bytes of the longest list of commands
    whole: int = 0  # most bytes of a message, without values that have a row for each sample
    per_row: int = 0  # most bytes of a message for each sample

    def received(self, values: list[tuple[str, Tree]]) -> None:
        """Note the kinds and values of one message."""
        self.forms += [(kind, form_of(kind, value)) for kind, value in values]
        self.settings += [value for _, value in values if isinstance(value, int | float)]
        by_row = [(kind in BY_SAMPLE, value) for kind, value in values]
        self.whole = max(self.whole, sum(tree.num_bytes(value) for is_row, value in by_row if not is_row))
        self.per_row = max(self.per_row, sum(_bytes_of_a_row(value) for is_row, value in by_row if is_row))


@dataclass(kw_only=True)
class Recorder(Remote):
    """A transport whose clients all answer at once; records what one of them is asked."""

    own: int  # the number of this client

    def __post_init__(self) -> None:
        super().__post_init__()
        self.record, self._reader = Heard(round=self.round.number), Reader()
        self._notes: list[tuple[str, Any]] = []  # kind and value of what came down, and the number of each mini-batch

    def alive(self, ids: Ids) -> Ids:
        return ids

    def ask(self, requests: Mapping[int, Request], home: Place) -> tuple[Ids, dict[int, list[Tree]]]:
        if self.own in requests:
            self._record(requests[self.own])
        return tuple(requests), {}

    def finish(self) -> None:
        rest = self.queues[self.own].rest() if self.own in self.queues else None
        if rest is not None:
            self._record(rest)

    def load(
        self, walk: Walk, steps: Mapping[int, int], number: int, step_keys: Mapping[int, int]
    ) -> tuple[PerClient, PerClient]:
        self._notes += [("", steps[self.own])] if self.own in steps else []
        return super().load(walk, steps, number, step_keys)

    def own_seeds(self, number: int, ids: Ids) -> PerClient:
        self.record.seeds[number] += self.own in ids
        return super().own_seeds(number, ids)

    def down(self, kind: Kind, value: PerClient) -> Any:
        self._notes += [(kind.name, value.at(self.own))] if self.own in value.ids else []
        return super().down(kind, value)

    def _ref(self, value: PerClient, j: int) -> Ref:
        if j == self.own and value.place != "anywhere" and not isinstance(value.at(j), Ref):
            self._notes.append(("constant", value.at(j)))
        return super()._ref(value, j)

    def _record(self, request: Request) -> None:
        notes, values = iter(self._notes), list[tuple[str, Tree]]()
        for command in request.commands:
            kind, content = next(notes) if isinstance(command, WITH_NOTE) else NO_NOTE
            line = self._reader.line(command, content, kind)
            self._reader.note(command, line, content)
            self.record.slots = max(self.record.slots, self._reader.num_slots)
            self.record.lines += [] if line is None else [line]
            if isinstance(command, c.Batch):
                self.record.steps.append(content)
            elif kind:
                values.append((kind, content))
        self._notes = list(notes)
        self.record.received(values)
        self.record.leaves += [(kind, form_of(kind, flat.tree())) for kind, flat in request.expected]
        self.record.up += sum(a.nbytes for _, flat in request.expected for a in flat.tensors)
        self.record.header = max(self.record.header, len(msgspec.msgpack.encode(request.commands)))


def _bytes_of_a_row(value: Tree) -> int:
    return sum(a.nbytes // max(len(a), 1) for a in tree.tensors(value) if a.dim())
