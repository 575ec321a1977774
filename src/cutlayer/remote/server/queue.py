"""The lazy queue of one client: commands wait here until a server needs an answer.

A slot is reused as soon as nobody holds its value, the lowest first. The list of a step is therefore soon the same as
that of the step before, and need not be sent again.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.kinds import Parcel
from cutlayer.core.tree import Pending, Tree
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.server.shape_runner import SOME_KEY, ShapeRunner, Spec
from cutlayer.remote.tensors.trees import Flat, filled, flatten


class Request(NamedTuple):
    """The commands that were in a queue, and what the answer must look like."""

    commands: tuple[c.AnyCommand, ...]
    numbers: tuple[int | float, ...]
    tensors: list[Tensor]
    expected: tuple[tuple[str, Flat], ...]  # kind and form of each value in the answer

    def values(self, numbers: Sequence[float], tensors: Sequence[Tensor]) -> list[Tree]:
        """Return the values of an answer that consists of these numbers and tensors."""
        number, tensor = iter(numbers).__next__, iter(tensors).__next__
        return [filled(flat.structure, number, tensor) for _, flat in self.expected]


class Ref(Pending):
    """A value at a client. Its fields are refs, too."""

    __slots__ = ("queue", "slot", "spec")

    def __init__(self, queue: "Queue", slot: int, spec: Spec) -> None:
        self.queue, self.slot, self.spec = queue, slot, spec

    def item(self, name: str) -> "Ref":
        return self.queue.field(self, name)

    @property
    def bare(self) -> Tree:
        return self.spec.bare

    @property
    def signature(self) -> Hashable:
        return tree.signature(self.spec.bare)

    def __del__(self) -> None:
        self.queue.freed.append(self.slot)


class Queue:
    """One client's commands in one round."""

    def __init__(self, shapes: ShapeRunner) -> None:
        self.freed: deque[int] = deque()  # refs are deleted at any time, in any thread
        self._shapes = shapes
        self._commands: list[c.AnyCommand] = []
        self._numbers: list[int | float] = []
        self._tensors: list[Tensor] = []
        self._used: set[int] = set()

    def put(self, value: Tree) -> Ref:
        flat = flatten(value)
        self._tensors += flat.tensors
        return self._add(self._shapes.put(value), lambda out: c.Put(out, flat.skeleton), *flat.numbers)

    def get(self, shape: Tree, number: int) -> Ref:
        """A value of this shape that the fed server sends directly."""
        return self._add(self._shapes.put(shape), c.Get, number)

    def key(self, number: int) -> Ref:
        return self._add(self._shapes.put(torch.tensor(SOME_KEY)), c.Key, number)

    def batch(self, size: int, step: int, number: int, length: int) -> tuple[Ref, ...]:
        self._numbers += [size, step, number]
        return self._run([], lambda _, x, y: c.Batch(x, y), 2, like=(length, 0, 0))

    def own(self, number: int) -> Ref:
        self._numbers.append(number)
        return self._run([], lambda _, out: c.Own(out), like=(0,))[0]

    def do(self, function: str, arguments: list[Ref]) -> Ref:
        return self._run(arguments, lambda slots, out: c.Do(out, function, slots))[0]

    def vjp(self, function: str, arguments: list[Ref]) -> tuple[Ref, ...]:
        return self._run(arguments, lambda slots, out, pullback: c.Vjp(out, pullback, function, slots), 2)

    def grad(self, function: str, arguments: list[Ref], cut: int | None) -> Ref:
        return self._run(arguments, lambda slots, out: c.Grad(out, function, slots, cut))[0]

    def pull(self, pullback: Ref, gradient: Ref) -> Ref:
        return self._run([pullback, gradient], lambda slots, out: c.Pull(out, *slots))[0]

    def field(self, of: Ref, name: str) -> Ref:
        return self._run([of], lambda slots, out: c.Field(out, slots[0], name))[0]

    def keep(self, name: str, value: Ref, version: int) -> Ref:
        return self._add(value.spec, lambda out: c.KeepValue(out, name, value.slot), version)

    def recall(self, name: str, spec: Spec) -> Ref:
        return self._add(spec, lambda out: c.RecallValue(out, name))

    def request(self, parcels: list[Parcel], refs: list[Ref], delivery: int | None = None) -> Request:
        """Empty the queue into a request for these values; a delivery with a number goes to a separate fed server."""
        names, slots = tuple(p.kind.name for p in parcels), tuple(r.slot for r in refs)
        self._collect()
        self._numbers += [] if delivery is None else [delivery]
        self._commands.append(c.Up(names, slots) if delivery is None else c.Deliver(names, slots))
        return self._emptied(tuple((name, flatten(ref.spec.bare)) for name, ref in zip(names, refs, strict=True)))

    def rest(self) -> Request | None:
        """Return what is left at the end of a round if it tells the client to keep a value; it wants no answer."""
        return self._emptied(()) if any(isinstance(command, c.KeepValue) for command in self._commands) else None

    def _emptied(self, expected: tuple[tuple[str, Flat], ...]) -> Request:
        request = Request(tuple(self._commands), tuple(self._numbers), self._tensors, expected)
        self._commands, self._numbers, self._tensors = [], [], []
        return request

    def _run(
        self, arguments: list[Ref], make: Callable[..., c.AnyCommand], num: int = 1, like: tuple[int, ...] = ()
    ) -> tuple[Ref, ...]:
        """Append the command that `make` makes of its arguments' slots and of the `num` slots of its results.

        The shapes of the results come from a run on shapes, which takes `like` in place of the command's numbers.
        """
        places = tuple(range(len(arguments) + num))
        on_shapes = make(places[: len(arguments)], *places[len(arguments) :])
        specs = self._shapes.after(on_shapes, tuple(a.spec for a in arguments), like)
        results = tuple(self._new(spec) for spec in specs)
        self._commands.append(make(tuple(a.slot for a in arguments), *(r.slot for r in results)))
        return results

    def _add(self, spec: Spec, make: Callable[[int], c.AnyCommand], *numbers: int | float) -> Ref:
        """Append the command that `make` makes of the slot of its result, with the numbers that it takes."""
        ref = self._new(spec)
        self._numbers += numbers
        self._commands.append(make(ref.slot))
        return ref

    def _new(self, spec: Spec) -> Ref:
        self._collect()
        slot = next(slot for slot in count() if slot not in self._used)
        self._used.add(slot)
        return Ref(self, slot, spec)

    def _collect(self) -> None:
        """Free the slots whose value nobody holds any more."""
        while self.freed:
            slot = self.freed.popleft()
            self._used.remove(slot)
            self._commands.append(c.Free(slot))
