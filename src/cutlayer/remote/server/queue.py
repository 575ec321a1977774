"""The lazy queue of one client: commands wait here until a server needs an answer.

Slots are used again as soon as nobody holds their value, the lowest first, so that the list of a step is soon the same
as that of the step before.
"""

import heapq
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from cutlayer.core.kinds import Parcel
from cutlayer.core.tree import Handle, Tree
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.server.shape_runner import ShapeRunner, Spec
from cutlayer.remote.tensors.trees import Flat, flatten


class Request(NamedTuple):
    """The commands that waited, and what the answer must look like."""

    commands: tuple[c.AnyCommand, ...]
    numbers: tuple[int | float, ...]
    tensors: list[Tensor]
    expected: tuple[tuple[str, Flat], ...]  # the kind and the form of each value that is to come up


class Ref(Handle):
    """A value at a client. Its fields are refs, too."""

    __slots__ = ("queue", "slot", "spec")

    def __init__(self, queue: "Queue", slot: int, spec: Spec) -> None:
        self.queue, self.slot, self.spec = queue, slot, spec

    def item(self, name: str) -> "Ref":
        return self.queue.field(self, name)

    def __del__(self) -> None:
        self.queue.freed.append(self.slot)


class Queue:
    """One client's commands in one round."""

    def __init__(self, shapes: ShapeRunner) -> None:
        self.freed: deque[int] = deque()  # refs die at any time, in any thread
        self._shapes = shapes
        self._commands: list[c.AnyCommand] = []
        self._numbers: list[int | float] = []
        self._tensors: list[Tensor] = []
        self._free: list[int] = []
        self._top = 0

    def put(self, value: Tree) -> Ref:
        flat = flatten(value)
        self._tensors += flat.tensors
        return self._add(self._shapes.put(value), lambda out: c.Put(out, flat.skeleton), *flat.numbers)

    def get(self, shape: Tree, number: int) -> Ref:
        """A value of this shape that the fed server sends itself."""
        return self._add(self._shapes.put(shape), c.Get, number)

    def key(self, key: int) -> Ref:
        return self._add(self._shapes.put(0), c.Key, key)

    def batch(self, size: int, step: int, key: int, length: int) -> tuple[Ref, Ref]:
        x, y = (self._new(spec) for spec in self._shapes.batch(length))
        self._numbers += [size, step, key]
        self._commands.append(c.Batch(x.slot, y.slot))
        return x, y

    def own(self, number: int) -> Ref:
        (spec,) = self._shapes.after(c.Own(0))
        return self._add(spec, c.Own, number)

    def do(self, function: str, arguments: list[Ref]) -> Ref:
        places, slots = _places(arguments)
        (spec,) = self._shapes.after(c.Do(len(places), function, places), *_specs(arguments))
        return self._add(spec, lambda out: c.Do(out, function, slots))

    def vjp(self, function: str, arguments: list[Ref]) -> tuple[Ref, Ref]:
        places, slots = _places(arguments)
        specs = self._shapes.after(c.Vjp(len(places), len(places) + 1, function, places), *_specs(arguments))
        out, pullback = (self._new(spec) for spec in specs)
        self._commands.append(c.Vjp(out.slot, pullback.slot, function, slots))
        return out, pullback

    def grad(self, function: str, arguments: list[Ref], cut: int | None) -> Ref:
        places, slots = _places(arguments)
        (spec,) = self._shapes.after(c.Grad(len(places), function, places, cut), *_specs(arguments))
        return self._add(spec, lambda out: c.Grad(out, function, slots, cut))

    def pull(self, pullback: Ref, gradient: Ref) -> Ref:
        (spec,) = self._shapes.after(c.Pull(2, 0, 1), pullback.spec, gradient.spec)
        return self._add(spec, lambda out: c.Pull(out, pullback.slot, gradient.slot))

    def field(self, of: Ref, name: str) -> Ref:
        (spec,) = self._shapes.after(c.Field(1, 0, name), of.spec)
        return self._add(spec, lambda out: c.Field(out, of.slot, name))

    def keep(self, name: str, value: Ref, version: int) -> Ref:
        return self._add(value.spec, lambda out: c.KeepValue(out, name, value.slot), version)

    def recall(self, name: str, spec: Spec) -> Ref:
        return self._add(spec, lambda out: c.RecallValue(out, name))

    def request(self, parcels: list[Parcel], refs: list[Ref], delivery: int | None = None) -> Request:
        """Everything so far, with these values as the answer; the queue is empty after that.

        With the number of a delivery, the answer goes to the fed server.
        """
        names, slots = tuple(p.kind.name for p in parcels), tuple(r.slot for r in refs)
        self._collect()
        if delivery is None:
            self._commands.append(c.Up(names, slots))
        else:
            self._numbers.append(delivery)
            self._commands.append(c.Deliver(names, slots))
        return self._emptied(tuple((name, ref.spec.flat) for name, ref in zip(names, refs, strict=True)))

    def rest(self) -> Request | None:
        """What is left when a round ends, if clients are to keep anything of it; it wants no answer."""
        return self._emptied(()) if any(isinstance(command, c.KeepValue) for command in self._commands) else None

    def _emptied(self, expected: tuple[tuple[str, Flat], ...]) -> Request:
        request = Request(tuple(self._commands), tuple(self._numbers), self._tensors, expected)
        self._commands, self._numbers, self._tensors = [], [], []
        return request

    def _add(self, spec: Spec, command: Callable[[int], c.AnyCommand], *numbers: int | float) -> Ref:
        """Append a command, made of the slot of its result, and the numbers that it takes."""
        ref = self._new(spec)
        self._numbers += numbers
        self._commands.append(command(ref.slot))
        return ref

    def _new(self, spec: Spec) -> Ref:
        self._collect()
        if not self._free:
            heapq.heappush(self._free, self._top)
            self._top += 1
        return Ref(self, heapq.heappop(self._free), spec)

    def _collect(self) -> None:
        """Slots whose value nobody holds any more are free."""
        while self.freed:
            slot = self.freed.popleft()
            heapq.heappush(self._free, slot)
            self._commands.append(c.Free(slot))


def _places(arguments: list[Ref]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(range(len(arguments))), tuple(a.slot for a in arguments)


def _specs(arguments: list[Ref]) -> list[Spec]:
    return [a.spec for a in arguments]
