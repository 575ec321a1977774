"""What waits to be computed for one client, and handles to it.

A handle (`Ref`) names a slot of the client's queue. A chain names what it reads and makes by their order, not by slots,
so that the chain of a step is the same as that of the step before.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from cutlayer.engines.graph.forms import Form, Memory, Path
from cutlayer.tree import Pending, Tree


class Cell:
    """One slot of a queue, held by the handles to its value."""

    __slots__ = ("queue", "slot")

    def __init__(self, queue: "Queue", slot: int) -> None:
        self.queue, self.slot = queue, slot

    def __del__(self) -> None:
        self.queue.freed.append(self.slot)


class Formed(Pending):
    """A value, or a field of one at this path, that looks like its form."""

    __slots__ = ("form", "path")
    form: Form
    path: Path

    @property
    def bare(self) -> Tree:
        return self.form.bare

    @property
    def look(self) -> Form:
        return self.form


class Ref(Formed):
    """A value of one client, or a field of one."""

    __slots__ = ("__weakref__", "cell")

    def __init__(self, cell: Cell, form: Form, path: Path = ()) -> None:
        self.cell, self.form, self.path = cell, form, path

    def item(self, name: Any) -> "Ref":
        return Ref(self.cell, self.form.field(name), (*self.path, name))


class Loan:
    """Memory for a value that all clients read, held by the handles to the value."""

    __slots__ = ("buffer",)

    def __init__(self, buffer: "Buffer") -> None:
        self.buffer = buffer

    def __del__(self) -> None:
        self.buffer.freed.append(self.buffer)


class Shared(Formed):
    """A value that is the same for all clients, or a field of one, in memory of the engine's."""

    __slots__ = ("loan",)

    def __init__(self, loan: Loan, form: Form, path: Path = ()) -> None:
        self.loan, self.form, self.path = loan, form, path

    def item(self, name: Any) -> "Shared":
        return Shared(self.loan, self.form.field(name), (*self.path, name))


class Moved:
    """A value that was in another client's queue, in memory of its own; its numbers are tensors, so nobody waits."""

    __slots__ = ("form", "memory")

    def __init__(self, form: Form, memory: Memory) -> None:
        self.form, self.memory = form, memory

    @property
    def tree(self) -> Tree:
        return self.form.layout.of(self.memory)


class Buffer(NamedTuple):
    """Memory for a value that all clients read."""

    number: int
    form: Form
    tree: Tree
    memory: Memory
    freed: "deque[Buffer]"


@dataclass(frozen=True, slots=True)
class Read:
    """An argument: a value that an earlier chain left, or a field of it; by the order in which the chain reads them."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class Made:
    """An argument that this chain makes itself, or a field of it; by the order in which it makes them."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class Put:
    """An argument that comes from outside of the queue, by the order in which the chain takes them."""

    number: int


@dataclass(frozen=True, slots=True)
class Common:
    """An argument that is the same for all clients, or a field of it: the number of its buffer."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class Literal:
    """An argument that is a plain number or nothing; it is part of the chain, and 1 is neither 1.0 nor True."""

    kind: type
    value: Any


@dataclass(frozen=True, slots=True)
class Several:
    """An argument that is a plain tuple of values."""

    items: tuple[Any, ...]


class Command(NamedTuple):
    """One operation. Its results are the next values that the chain makes."""

    how: str  # call, vjp, grad or pull
    fn: Any
    args: tuple[Any, ...]
    cut: int | None


NOT_KEPT = object()  # by the recording of a value's chain


class Value(NamedTuple):
    """What a slot holds."""

    form: Form
    tree: Tree  # or NOT_KEPT
    home: int | None = None  # the number of its bank of rows, if it lies in the rows of the client's lane
    origin: tuple[Any, int] | None = None  # the chain that made it, and which of its values it is


class Queue:
    """One client's chain under way, and the values that earlier chains left in its slots."""

    def __init__(self, client: int) -> None:
        self.client = client
        self.freed: deque[int] = deque()  # handles die at any time
        self.values: dict[int, Value] = {}
        self.forms: dict[int, Form] = {}  # of slots that are held
        self._free: list[int] = []
        self._top = 0
        self.begin()

    def begin(self) -> None:
        """A new chain."""
        self.commands: list[Command] = []
        self.reads: dict[int, int] = {}  # by slot: the number under which the chain reads what was there
        self.made: dict[int, int] = {}  # by slot: the number of what the chain has put there
        self.puts: list[tuple[Form, Tree]] = []
        self.common: dict[int, Loan] = {}
        self._num_made = 0
        self._put_numbers: dict[int, int] = {}

    @property
    def asks_pullback(self) -> bool:
        """Whether the chain reads a pullback: if it left a new one as well, it would be another chain at each step."""
        return any(self.values[slot].form.is_pullback for slot in self.reads)

    def held(self, form: Form) -> Ref:
        """A handle to a slot that nobody held."""
        self.collect()
        if not self._free:
            heapq.heappush(self._free, self._top)
            self._top += 1
        slot = heapq.heappop(self._free)
        self.forms[slot] = form
        return Ref(Cell(self, slot), form)

    def add(self, command: Command, forms: tuple[Form, ...]) -> list[Ref]:
        """Handles to what one more operation of the chain makes."""
        self.commands.append(command)
        refs = [self.held(form) for form in forms]
        for ref in refs:
            self.made[ref.cell.slot] = self._num_made
            self._num_made += 1
        return refs

    def argument(self, ref: Ref) -> Read | Made:
        slot = ref.cell.slot
        if slot in self.made:
            return Made(self.made[slot], ref.path)
        return Read(self.reads.setdefault(slot, len(self.reads)), ref.path)

    def put(self, form: Form, value: Tree) -> Put:
        """The value as an argument, once for a chain that names it several times."""
        number = self._put_numbers.setdefault(id(value), len(self.puts))
        if number == len(self.puts):
            self.puts.append((form, value))
        return Put(number)

    def collect(self) -> None:
        """Slots whose value nobody holds any more are free."""
        while self.freed:
            slot = self.freed.popleft()
            del self.forms[slot]
            heapq.heappush(self._free, slot)


class Function:
    """A function in chains: one and the same for functions that do the same."""

    __slots__ = ("fn",)

    def __init__(self, fn: Any) -> None:
        self.fn = fn


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
