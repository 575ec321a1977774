"""A client's side of a round: it runs lists of commands with the same verbs, and so under the same laws, as elsewhere.

The client itself refuses what the verbs refuse, whatever a server asks for: a function that its own copy of the method
does not declare, or a value that was not made by a function that gives it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutlayer.core import keys, tree
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.checks import reason
from cutlayer.core.crossing import mark_of, marked
from cutlayer.core.kinds import KINDS, Kind, Place
from cutlayer.core.places import Clients, World
from cutlayer.core.precision import Precision, computing
from cutlayer.core.program import Program
from cutlayer.core.transport import Transport
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient
from cutlayer.errors import CutlayerError, LawError, WireError
from cutlayer.registry import find
from cutlayer.remote.device.conversation import Content, Follower
from cutlayer.remote.protocol import commands as c
from cutlayer.remote.tensors.trees import build

KIND_BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
MOST_SLOTS = 10_000
# Any error that a list of commands can cause, except that the device is out of memory or the connection is gone.
REFUSED = (
    CutlayerError,
    LookupError,
    ValueError,
    TypeError,
    RuntimeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
)


class WorkError(CutlayerError):
    """A client could not do its work: at which command, and why."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


@dataclass(kw_only=True)
class Round:
    """One client in one round: it runs commands, whose values lie in numbered slots."""

    client: int
    program: Program
    transport: Transport
    walk: Callable[[Mapping[int, int]], Walk]
    num_samples: int
    key: int
    never: frozenset[str] = frozenset()  # kinds that this client does not send, whatever the method says
    precision: Precision = "fp32"  # that layers compute in
    fed_value: Callable[[int], Tree] | None = None  # waits for a value from a separate fed server
    follower: Follower | None = None  # knows what the server may ask; None trusts it to ask for what the method does
    slots: dict[int, PerClient] = field(default_factory=dict)
    _got: int = field(default=0, init=False)  # values that came from the fed server

    def __post_init__(self) -> None:
        world = World(
            program=self.program,
            transport=self.transport,
            walk=self.walk,
            sizes={self.client: float(self.num_samples)},
            key=self.key,
        )
        self.clients = Clients(world, (self.client,))

    @torch.no_grad()
    def run(self, commands: Sequence[c.AnyCommand], numbers: Sequence[float], tensors: Sequence[Tensor]) -> list[Tree]:
        """Run a list of commands; return the values that go up at its end."""
        supply = Supply(numbers, tensors)
        leaving: list[Tree] = []
        with computing(self.precision):
            for place, command in enumerate(commands):
                try:
                    if leaving:  # it would go to the home of the last one
                        raise WireError("it comes after an up or deliver, which ends a list")
                    leaving += self._run(command, supply)
                except REFUSED as error:
                    raise WorkError(f"command {place + 1} ({described(command)})", reason(error)) from error
        supply.check_empty()
        return leaving

    def _run(self, command: c.AnyCommand, supply: "Supply") -> list[Tree]:
        clients, functions, get = self.clients, self.program.by_address, self._get
        match command:
            case c.Put(out, skeleton):
                value = build(skeleton, supply.number, supply.tensor)
                self._follow(command, value)
                self._set(out, self._value(value))
                return []
            case c.Get(out):
                if self.fed_value is None:
                    raise WireError("there is no fed server of its own that could send a parcel")
                value = self.fed_value(self._next_get(supply.count()))
                self._follow(command, value)
                self._set(out, self._value(value))
                return []
            case c.Batch(x, y):
                size, step, number = supply.count(), supply.count(), supply.count()
                self._follow_batch(command, size, step, number)
                walk = self.walk({self.client: max(1, size)})
                inputs, labels = clients.load(walk, {self.client: step}, number, {self.client: self._key(number)})
                self._set(x, inputs)
                self._set(y, labels)
                return []
            case c.Own(out):
                number = supply.count()
                self._follow(command, number)
                self._set(out, clients.own_seeds(number))
                return []
            case c.Key(out):
                number = supply.count()
                self._follow(command, number)
                self._set(out, self._value(torch.tensor(self._key(number))))
                return []
        self._follow(command)
        match command:
            case c.Do(out, name, arguments):
                self._check_codes(name, arguments)
                self._set(out, clients.do(find("function", functions, name), *map(get, arguments)))
            case c.Vjp(out, pullback, name, arguments):
                result, pull = clients.vjp(find("function", functions, name), *map(get, arguments))
                self._set(out, result)
                self._set(pullback, pull)
            case c.Grad(out, name, arguments, cut):
                self._set(out, clients.grad(find("function", functions, name), *map(get, arguments), cut=cut))
            case c.Pull(out, pullback, gradient):
                self._set(out, clients.do(get(pullback), get(gradient)))
            case c.Field(out, of, name):
                self._set(out, _field(get(of), name))
            case c.KeepValue(out, name, value):
                self._set(out, clients.memory.keep(name, self._keepable(name, get(value)), supply.count()))
            case c.RecallValue(out, name):
                self._set(out, self._recalled(name, clients.memory.recall(name)))
            case c.Free(slot):
                self._get(slot)
                del self.slots[slot]
            case c.Up(kinds, slots):
                return self._leaving(kinds, slots, "server")
            case c.Deliver(kinds, slots):
                supply.count()
                return self._leaving(kinds, slots, "fed")
        return []

    def _follow(self, command: c.AnyCommand, content: Content = None) -> None:
        if self.follower is not None:
            self.follower.follow(command, content)

    def _follow_batch(self, command: c.Batch, size: int, step: int, number: int) -> None:
        if self.follower is not None:
            self.follower.check_batch(size, step, number)
            self.follower.follow(command, step)

    def _key(self, number: int) -> int:
        return keys.of_step(self.key, number, self.client)

    def _next_get(self, number: int) -> int:
        """Check that the values of a fed server are used in the order in which it sends them, each once."""
        self._got += 1
        if number != self._got:
            raise WireError(f"value {number} of the fed server stands where number {self._got} belongs")
        return number

    def _leaving(self, names: tuple[str, ...], slots: tuple[int, ...], to: Place) -> list[Tree]:
        kinds = [find("kind", KIND_BY_NAME, name) for name in names]
        for kind in kinds:
            if kind.name in self.never:
                raise LawError(f"this client never sends {kind.name}")
            if self.fed_value is not None and kind.home != to:
                raise LawError(f"{kind.name} go to the {kind.home} server, and never to the {to} server")
        brought = self.clients.up(*(kind(self._get(slot)) for kind, slot in zip(kinds, slots, strict=True)))
        values = [v.row(self.client) for v in (brought if isinstance(brought, tuple) else (brought,))]
        if self.follower is not None:
            self.follower.check_leaving(names, values)
        return values

    def _check_codes(self, function: str, arguments: tuple[int, ...]) -> None:
        """Check that what is to be decoded is what the codec makes; shapes alone need no check."""
        for coder in self.program.coders.values():
            if function == self.program.address(coder.decode):
                values = [self._get(slot).at(self.client) for slot in arguments]
                for value in values if not any(a.is_meta for a in tree.tensors(values)) else ():
                    coder.check(value)

    def _keepable(self, name: str, value: PerClient) -> PerClient:
        """Refuse to keep anything but what a codec lost under the codecs' names: it is added to what is sent."""
        mark = mark_of(name)
        if mark is not None and any(b.gives != mark for b in value.blocks):
            raise LawError(f"only what the codec of {mark.kind.name} lost is kept as {name!r}")
        return value

    def _recalled(self, name: str, value: PerClient) -> PerClient:
        mark = mark_of(name)
        return value if mark is None else marked(value, mark)

    def _value(self, value: Tree) -> PerClient:
        return PerClient("clients", [Block((self.client,), value, stacked=False)])

    def _get(self, slot: int) -> PerClient:
        if slot not in self.slots:
            raise WireError(f"slot {slot} is empty")
        return self.slots[slot]

    def _set(self, slot: int, value: PerClient) -> None:
        if not 0 <= slot < MOST_SLOTS:
            raise WireError(f"there is no slot {slot}; they go from 0 to {MOST_SLOTS - 1}")
        self.slots[slot] = value


def _field(value: PerClient, name: str) -> PerClient:
    """Return a field of a named tuple, or the model of a part; a server may name nothing else."""
    own = value.blocks[0].tree if value.blocks else None
    if name not in (*getattr(own, "_fields", ()), "model") or not isinstance(own, tuple):
        raise WireError(f"a {type(own).__name__} has no field {name!r}")
    return PerClient(value.place, [b.field(name) for b in value.blocks], value.ids)


class Supply:
    """The numbers and tensors that commands take, in order."""

    def __init__(self, numbers: Sequence[float], tensors: Sequence[Tensor]) -> None:
        self._left: tuple[Iterator[Any], ...] = (iter(numbers), iter(tensors))
        self.number = partial(_next, self._left[0], "number")
        self.tensor = partial(_next, self._left[1], "tensor")

    def count(self) -> int:
        value = self.number()
        if type(value) is not int or value < 0:
            raise WireError(f"{value!r} stands where a whole number from 0 up belongs")
        return value

    def check_empty(self) -> None:
        if any(next(left, None) is not None for left in self._left):
            raise WorkError("the end of the list", "there are more numbers or tensors than its commands take")


def _next(supply: Iterator[Any], what: str) -> Any:
    value = next(supply, None)
    if value is None:
        raise WireError(f"there are fewer {what}s than the commands take")
    return value


def described(command: c.AnyCommand) -> str:
    """Describe a command in an error message."""
    name = getattr(command, "function", None) or getattr(command, "name", None)
    return " ".join(filter(None, (str(command.__struct_config__.tag), name)))


def walk_of(batching: Batching, client: int, num_samples: int, key: int) -> Callable[[Mapping[int, int]], Walk]:
    """Return the batches of a client that holds only its own samples, numbered from 0."""
    index = {client: np.arange(num_samples, dtype=np.int64)}

    @lru_cache(maxsize=1)  # so that a pass is drawn once and not at every step
    def walk(sizes: tuple[tuple[int, int], ...]) -> Walk:
        return Walk(batching, index, key, dict(sizes))

    return lambda sizes: walk(tuple(sizes.items()))
