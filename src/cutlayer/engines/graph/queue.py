"""What waits to be computed for one client, and handles to it.

A handle (`Promise`) names a slot of the client's queue. A chain names what it reads and makes by their order, not by
slots, so that the chain of a step is the same as that of the step before.
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
    """A value, or a field of one at this path, that looks like its form; what it holds keeps the value alive."""

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
    """A value of one client, or a field of one."""

    __slots__ = ("__weakref__",)
    held: Cell


class Shared(Formed):
    """A value that is the same for all clients, or a field of one, in memory of the engine's."""

    __slots__ = ()
    held: Loan


class Moved:
    """A value that was in another client's queue, in memory of its own; its numbers are tensors, so nobody waits."""

    __slots__ = ("form", "memory")

    def __init__(self, form: Form, memory: Memory) -> None:
        self.form, self.memory = form, memory

    @property
    def tree(self) -> Tree:
        return self.form.layout.of(self.memory)


class Argument(NamedTuple):
    """An argument of an operation: a value, or the field of one at this path."""

    source: str  # a field of `Inputs`, or "made" for what the chain makes itself
    number: int  # by the order in which the chain reads, takes or makes them; of a common value, that of its buffer
    path: Path = ()


class Literal(NamedTuple):
    """An argument that is a plain number or None. It is part of the chain, and 1 differs from 1.0 and True."""

    kind: type
    value: Any


class Several(NamedTuple):
    """An argument that is a plain tuple of values."""

    items: tuple[Any, ...]


class Operation(NamedTuple):
    """One operation. Its results are the next values that the chain makes."""

    how: str  # call, vjp, grad or pull
    fn: "Same"  # one and the same for functions that do the same; of None for a pullback
    args: tuple[Any, ...]
    cut: int | None


NOT_KEPT = object()  # by the recording of a value's chain


class Value(NamedTuple):
    """What a slot holds."""

    form: Form
    tree: Tree  # or NOT_KEPT
    home: int | None = None  # the number of its bank of rows, if it lies in the rows of the client's lane
    origin: tuple[Any, int] | None = None  # the chain that made it, and which of its values it is


class ClientQueue:
    """One client's chain under way, and the values that earlier chains left in its slots."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.freed: deque[int] = deque()  # handles die at any time
        self.values: dict[int, Value] = {}
        self.forms: dict[int, Form] = {}  # of slots that are held
        self._free: list[int] = []
        self._unused = itertools.count()
        self.begin()

    def begin(self) -> None:
        """A new chain."""
        self.operations: list[Operation] = []
        self.reads: dict[int, int] = {}  # by slot: the number under which the chain reads what was there
        self.made: dict[int, int] = {}  # by slot: the number of what the chain has put there
        self.externals: list[tuple[Form, Tree]] = []
        self.common: dict[int, Loan] = {}
        self._num_made = 0
        self._external_numbers: dict[int, int] = {}

    @property
    def asks_pullback(self) -> bool:
        """Whether the chain reads a pullback: if it left a new one as well, it would be another chain at each step."""
        return any(self.values[slot].form.is_pullback for slot in self.reads)

    def promise(self, form: Form) -> Promise:
        """A handle to a slot that nobody held."""
        self.collect()
        slot = heapq.heappop(self._free) if self._free else next(self._unused)
        self.forms[slot] = form
        return Promise(Cell(self, slot), form)

    def add(self, operation: Operation, forms: tuple[Form, ...]) -> list[Promise]:
        """Handles to what one more operation of the chain makes."""
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
        """The value as an argument, once for a chain that names it several times."""
        number = self._external_numbers.setdefault(id(value), len(self.externals))
        if number == len(self.externals):
            self.externals.append((form, value))
        return Argument("externals", number)

    def collect(self) -> None:
        """Slots whose value nobody holds any more are free."""
        while self.freed:
            slot = self.freed.popleft()
            del self.forms[slot]
            heapq.heappush(self._free, slot)


def name_of(fn: Any) -> Any:
    """What stays the same about a function from step to step: it is itself, and a method is that of its object."""
    if isinstance(fn, MethodType):
        return fn.__func__, Same(fn.__self__)
    if not isinstance(fn, partial):
        return Same(fn)
    given = (*fn.args, *fn.keywords.values())
    return "partial", name_of(fn.func), tuple(fn.keywords), tuple(map(_itself, given))


def _itself(value: Any) -> Any:
    return (type(value), value) if isinstance(value, int | float | str) or value is None else Same(value)


class Same:
    """An object, equal to itself alone, and alive as long as it is looked for."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
