"""The lazy queue of one client: commands wait here until a server needs an answer.

Slots are used again as soon as nobody holds their value, the lowest first, so that the list of a step is soon the same
as that of the step before.
"""

import heapq
from collections import deque
from typing import NamedTuple

from torch import Tensor

from cutlayer.kinds import Parcel
from cutlayer.remote import commands as c
from cutlayer.remote.shadow import Shadow, Spec
from cutlayer.remote.trees import Flat, flatten
from cutlayer.tree import Handle, Tree


class Letter(NamedTuple):
    """All that waited, ready to be sent, and what the answer must look like."""

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

    def __init__(self, shadow: Shadow) -> None:
        self.freed: deque[int] = deque()  # refs die at any time, in any thread
        self._shadow = shadow
        self._commands: list[c.AnyCommand] = []
        self._numbers: list[int | float] = []
        self._tensors: list[Tensor] = []
        self._free: list[int] = []
        self._top = 0

    def put(self, value: Tree) -> Ref:
        flat = flatten(value)
        ref = self._new(self._shadow.put(value))
        self._numbers += flat.numbers
        self._tensors += flat.tensors
        self._commands.append(c.Put(ref.slot, flat.skeleton))
        return ref

    def get(self, shape: Tree, number: int) -> Ref:
        """A value of this shape that the fed server sends itself."""
        ref = self._new(self._shadow.put(shape))
        self._numbers.append(number)
        self._commands.append(c.Get(ref.slot))
        return ref

    def key(self, key: int) -> Ref:
        ref = self._new(self._shadow.put(0))
        self._numbers.append(key)
        self._commands.append(c.Key(ref.slot))
        return ref

    def batch(self, size: int, step: int, key: int, length: int) -> tuple[Ref, Ref]:
        x, y = (self._new(spec) for spec in self._shadow.batch(length))
        self._numbers += [size, step, key]
        self._commands.append(c.Batch(x.slot, y.slot))
        return x, y

    def own(self, number: int) -> Ref:
        ref = self._new(*self._shadow.after(c.Own(0)))
        self._numbers.append(number)
        self._commands.append(c.Own(ref.slot))
        return ref

    def do(self, function: str, arguments: list[Ref]) -> Ref:
        places, slots = _places(arguments)
        ref = self._new(*self._shadow.after(c.Do(len(places), function, places), *_specs(arguments)))
        self._commands.append(c.Do(ref.slot, function, slots))
        return ref

    def vjp(self, function: str, arguments: list[Ref]) -> tuple[Ref, Ref]:
        places, slots = _places(arguments)
        specs = self._shadow.after(c.Vjp(len(places), len(places) + 1, function, places), *_specs(arguments))
        out, pullback = (self._new(spec) for spec in specs)
        self._commands.append(c.Vjp(out.slot, pullback.slot, function, slots))
        return out, pullback

    def grad(self, function: str, arguments: list[Ref], cut: int | None) -> Ref:
        places, slots = _places(arguments)
        ref = self._new(*self._shadow.after(c.Grad(len(places), function, places, cut), *_specs(arguments)))
        self._commands.append(c.Grad(ref.slot, function, slots, cut))
        return ref

    def pull(self, pullback: Ref, gradient: Ref) -> Ref:
        ref = self._new(*self._shadow.after(c.Pull(2, 0, 1), pullback.spec, gradient.spec))
        self._commands.append(c.Pull(ref.slot, pullback.slot, gradient.slot))
        return ref

    def field(self, of: Ref, name: str) -> Ref:
        ref = self._new(*self._shadow.after(c.Field(1, 0, name), of.spec))
        self._commands.append(c.Field(ref.slot, of.slot, name))
        return ref

    def keep(self, name: str, value: Ref, version: int) -> Ref:
        ref = self._new(value.spec)
        self._numbers.append(version)
        self._commands.append(c.Keep(ref.slot, name, value.slot))
        return ref

    def recall(self, name: str, spec: Spec) -> Ref:
        ref = self._new(spec)
        self._commands.append(c.Recall(ref.slot, name))
        return ref

    def letter(self, parcels: list[Parcel], refs: list[Ref], delivery: int | None = None) -> Letter:
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

    def rest(self) -> Letter | None:
        """What is left when a round ends, if clients are to keep anything of it; it wants no answer."""
        return self._emptied(()) if any(isinstance(command, c.Keep) for command in self._commands) else None

    def _emptied(self, expected: tuple[tuple[str, Flat], ...]) -> Letter:
        letter = Letter(tuple(self._commands), tuple(self._numbers), self._tensors, expected)
        self._commands, self._numbers, self._tensors = [], [], []
        return letter

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
