"""Queues of operations that wait for one client, and handles to their results.

A handle (`Promise`) names a slot of the client's queue. A chain names its inputs and results by position, not by slot,
so that the chain of a step equals that of the step before.
"""

import heapq
import itertools
from collections import deque
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Self

from cutlayer.core.tree import Pending, Tree
from cutlayer.engines.graph.buffers import Loan
from cutlayer.engines.graph.forms import Form, Memory, Path


class Cell:
    """One slot of a queue, held by the handles to its value."""

    __slots__ = ("queue", "slot")

    def __init__(self, queue: "ClientQueue", slot: int) -> None:
        self.queue, self.slot = queue, slot

    @property
    def value(self) -> "Value":
        return self.queue.values[self.slot]

    def __del__(self) -> None:
        self.queue.freed.append(self.slot)


class Formed(Pending):
    """A handle to a value of this form: the field at `path` of what it holds, and thereby keeps alive."""

    __slots__ = ("form", "held", "path")

    def __init__(self, held: Any, form: Form, path: Path = ()) -> None:
        self.held, self.form, self.path = held, form, path

    def item(self, name: Any) -> Self:
        return type(self)(self.held, self.form.field(name), (*self.path, name))

    @property
    def bare(self) -> Tree:
        return self.form.bare

    @property
    def signature(self) -> Form:
        return self.form


class Promise(Formed):
    """A handle to a value of one client, or to a field of it."""

    __slots__ = ("__weakref__",)
    held: Cell


class Shared(Formed):
    """A handle to a value that is the same for all clients, or to a field of it, in a buffer of the engine."""

    __slots__ = ()
    held: Loan


class Moved:
    """A copy of a value of another client's queue. Its numbers are tensors, so the host does not wait for them."""

    __slots__ = ("form", "memory")

    def __init__(self, form: Form, memory: Memory) -> None:
        self.form, self.memory = form, memory

    @property
    def tree(self) -> Tree:
        return self.form.layout.of(self.memory)


class Argument(NamedTuple):
    """An argument of an operation: a value, or the field of one at this path."""

    source: str  # a field of `Inputs`, or "made" for the chain's own results
    number: int  # its position in the source; of a common value, the number of its buffer
    path: Path = ()


class Literal(NamedTuple):
    """An argument that is a plain number or None. It is part of the chain, and 1 differs from 1.0 and True."""

    kind: type
    value: Any


class Several(NamedTuple):
    """An argument that is a plain tuple of values."""

    items: tuple[Any, ...]


class Operation(NamedTuple):
    """One operation of a chain."""

    how: str  # call, vjp, grad or pull
    fn: "Same"  # the same object for functions of the same name; holds None for a pull
    args: tuple[Any, ...]
    cut: int | None


NOT_KEPT = object()  # in place of a value that a recording did not keep


class Value(NamedTuple):
    """What a slot holds."""

    form: Form
    tree: Tree  # or NOT_KEPT
    home: int | None = None  # the number of its bank, if it lies in a row of the client's lane
    origin: tuple[Any, int] | None = None  # the chain that made it, and its number among the results


class ClientQueue:
    """The chain that one client's operations form, and the values that earlier chains left in its slots."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.freed: deque[int] = deque()  # appended to at any time, whenever the last handle dies
        self.values: dict[int, Value] = {}
        self.forms: dict[int, Form] = {}  # of the slots that somebody holds
        self._free: list[int] = []
        self._unused = itertools.count()
        self.begin()

    def begin(self) -> None:
        """Start a new chain."""
        self.operations: list[Operation] = []
        self.reads: dict[int, int] = {}  # by slot: the number of the input that the chain reads there
        self.made: dict[int, int] = {}  # by slot: the number of the result that the chain puts there
        self.externals: list[tuple[Form, Tree]] = []
        self.common: dict[int, Loan] = {}
        self._num_made = 0
        self._external_numbers: dict[int, int] = {}

    @property
    def asks_pullback(self) -> bool:
        """Whether the chain reads a pullback. If it also left a new one, it would be a different chain at each step."""
        return any(self.values[slot].form.is_pullback for slot in self.reads)

    def promise(self, form: Form) -> Promise:
        """Return a handle to a free slot."""
        self.collect()
        slot = heapq.heappop(self._free) if self._free else next(self._unused)
        self.forms[slot] = form
        return Promise(Cell(self, slot), form)

    def add(self, operation: Operation, forms: tuple[Form, ...]) -> list[Promise]:
        """Add an operation to the chain, and return handles to its results."""
        self.operations.append(operation)
        promises = [self.promise(form) for form in forms]
        for promise in promises:
            self.made[promise.held.slot] = self._num_made
            self._num_made += 1
        return promises

    def argument(self, promise: Promise) -> Argument:
        slot = promise.held.slot
        if slot in self.made:
            return Argument("made", self.made[slot], promise.path)
        return Argument("reads", self.reads.setdefault(slot, len(self.reads)), promise.path)

    def external(self, form: Form, value: Tree) -> Argument:
        """Return a value from outside the queue as an argument; a value that is named twice is one input."""
        number = self._external_numbers.setdefault(id(value), len(self.externals))
        if number == len(self.externals):
            self.externals.append((form, value))
        return Argument("externals", number)

    def collect(self) -> None:
        """Free the slots whose values nobody holds any more."""
        while self.freed:
            slot = self.freed.popleft()
            del self.forms[slot]
            heapq.heappush(self._free, slot)


def name_of(fn: Any) -> Any:
    """Return what identifies a function from step to step: the function itself, or a method and its object."""
    if isinstance(fn, MethodType):
        return fn.__func__, Same(fn.__self__)
    if not isinstance(fn, partial):
        return Same(fn)
    given = (*fn.args, *fn.keywords.values())
    return "partial", name_of(fn.func), tuple(fn.keywords), tuple(map(_itself, given))


def _itself(value: Any) -> Any:
    return (type(value), value) if isinstance(value, int | float | str) or value is None else Same(value)


class Same:
    """Wraps an object for comparison by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
