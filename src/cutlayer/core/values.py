"""Values at places: one per client (`PerClient`), or one at a server (`Held`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.tree import T, Tree
from cutlayer.errors import LawError


class Mark(NamedTuple):
    """What a value of a client is to the codec of a kind. Only the code may leave, as that kind."""

    kind: Kind
    part: Literal["code", "rest", "base"]  # what was lost is the rest; what came down is the base of a change


class Seed(NamedTuple):
    """Marks a seed of this number that only its client knows: codecs draw with no other, and with each one once."""

    number: int


Gives = Kind | Mark | Seed | Mapping[str, Kind | Mark] | None
Raw = Literal["x", "y"]


class OfTuple(NamedTuple):
    """Marks a plain tuple of a function that gives this kind: it may not leave, as a kind covers one value."""

    kind: Kind


class Who(Protocol):
    """Anything that names clients."""

    @property
    def ids(self) -> tuple[int, ...]: ...


@tree.storable
@dataclass(frozen=True, slots=True)
class Held(tree.Node, Generic[T]):
    """One value at a server. Its fields are values at that server, too, with the same `stays` and `ready`."""

    _fields = ("place", "tree", "stays", "ready")

    place: Place
    tree: T
    stays: bool = False  # it may tell of a single client, so it must not go to the other server
    ready: float = 0.0  # the simulated second at which it is available

    def __post_init__(self) -> None:
        _check_names(tree.bare(self.tree), self._fields, "a value that is held")

    def __getattr__(self, name: str) -> "Held[Any]":
        if name.startswith("_"):
            raise AttributeError(name)
        return Held(self.place, tree.field(self.tree, name), self.stays, self.ready)


class Block(NamedTuple):
    """The values of some clients: stacked on a leading axis, or one value that all of them share."""

    ids: tuple[int, ...]
    tree: Tree
    stacked: bool
    gives: Gives | OfTuple = None  # the kind, or the kind of each field, as which the client may send it
    raw: Raw | None = None  # the client's raw inputs or labels

    def take(self, ids: tuple[int, ...]) -> "Block":
        if ids == self.ids:
            return self
        if not self.stacked:
            return self._replace(ids=ids)
        index = self._index(ids)
        return self._replace(ids=ids, tree=tree.map(lambda a: a[index], self.tree))

    def _index(self, ids: tuple[int, ...]) -> slice | Tensor:
        at = {j: k for k, j in enumerate(self.ids)}
        rows = [at[j] for j in ids]
        if rows == list(range(rows[0], rows[0] + len(rows))):
            return slice(rows[0], rows[0] + len(rows))  # a view, no copy
        return torch.tensor(rows)

    def row(self, j: int) -> Tree:
        if not self.stacked:
            return self.tree
        k = self.ids.index(j)
        return tree.map(lambda a: a[k], self.tree)

    def wide(self) -> Tree:
        """Return the tree with a leading axis of clients, without copying a shared value."""
        n = len(self.ids)
        return self.tree if self.stacked else tree.map(lambda a: a.expand(n, *a.shape), self.tree)

    def field(self, name: str) -> "Block":
        gives = self.gives.get(name) if isinstance(self.gives, Mapping) else None
        return self._replace(tree=tree.field(self.tree, name), gives=gives)


NOBODY = -1  # the client number of a row that belongs to no client
ALWAYS: Mapping[int, float] = {}  # available from the beginning


class PerClient(Generic[T]):
    """One value per client: opaque at the clients, rows at a server.

    The engine decides how clients share blocks: equal shapes stacked, or one block for each client. `v[who]` selects
    clients, and `v[who] = new` replaces the values of those clients only.
    """

    __slots__ = ("_blocks", "_ids", "kind", "place", "ready")

    def __init__(
        self,
        place: Place,
        blocks: Sequence[Block],
        ids: Iterable[int] | None = None,
        kind: Kind | None = None,
        ready: Mapping[int, float] = ALWAYS,
    ) -> None:
        self.place = place
        self.kind = kind  # the kind as which it came up, until something is computed from it
        self.ready = ready  # by client: the simulated second at which its value is available
        self._blocks = list(blocks)
        for block in self._blocks[:1]:  # the others have the same structure
            _check_names(tree.bare(block.tree), OWN, "a value per client")
        self._ids = tuple(ids) if ids is not None else tuple(j for b in blocks for j in b.ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return self._ids

    @property
    def blocks(self) -> list[Block]:
        return self._blocks

    def __iter__(self) -> NoReturn:
        raise LawError(
            "the value of a client cannot be unpacked or iterated over: return a NamedTuple from the function and take "
            "its fields, such as value.loss"
        )

    def __getitem__(self, who: Who) -> "PerClient[T]":
        if isinstance(who, int | slice):
            iter(self)
        if who.ids == self._ids:
            return self._with(self._blocks, self._ids)
        wanted = set(who.ids)
        return self._with(_narrowed(self._blocks, wanted), tuple(j for j in self._ids if j in wanted))

    def __setitem__(self, who: Who, new: "PerClient[T]") -> None:
        if new.place != self.place:
            raise LawError(
                f"a value at the {new.place} cannot be put among values at the {self.place}; send it there first"
            )
        changed = new if new.ids == who.ids else new[who]
        stray = set(changed.ids) - set(self._ids)
        if stray:
            raise LawError(f"clients {sorted(stray)} hold no value here yet; only clients that do can be assigned to")
        kept = _narrowed(self._blocks, set(self._ids) - set(changed.ids))
        self._blocks = [*kept, *changed.blocks]
        if changed.ready or self.ready:
            self.ready = {**self.ready, **{j: changed.ready.get(j, 0.0) for j in changed.ids}}

    def __getattr__(self, name: str) -> "PerClient[Any]":
        if name.startswith("_"):
            raise AttributeError(name)
        return self._with([b.field(name) for b in self._blocks], self._ids)

    def _with(self, blocks: Sequence[Block], ids: tuple[int, ...]) -> "PerClient[Any]":
        return PerClient(self.place, blocks, ids, self.kind, self.ready)

    def row(self, j: int) -> T:
        """Return client j's value; only for values at a server."""
        if self.place == "clients":
            raise LawError(f"the value of client {j} is at the client; `up` is the only way to bring it to a server")
        return self.at(j)

    def at(self, j: int) -> T:
        """Return client j's value wherever it is; for engines."""
        value: T = next(b for b in self._blocks if j in b.ids).row(j)
        return value


OWN = tuple(name for name in dir(PerClient) if not name.startswith("_"))  # in alphabetical order


def _check_names(value: Tree, own: Sequence[str], what: str) -> None:
    """Refuse a field whose name is an attribute of the wrapper: it could not be accessed."""
    for name in own:
        if name in getattr(value, "_fields", ()):
            raise LawError(
                f"{type(value).__name__} has a field {name!r}, but `value.{name}` of {what} is an attribute of its "
                f"own; rename the field (these names are taken: {', '.join(own)})"
            )


def _narrowed(blocks: Iterable[Block], wanted: set[int]) -> list[Block]:
    kept = [(b, tuple(j for j in b.ids if j in wanted)) for b in blocks]
    return [b.take(ids) for b, ids in kept if ids]


def shared(place: Place, ids: tuple[int, ...], value: T, ready: float = 0.0) -> PerClient[T]:
    """Return the same value for all of these clients, stored once."""
    times = dict.fromkeys(ids, ready) if ready else ALWAYS
    return PerClient(place, [Block(ids, value, stacked=False)] if ids else [], ids, ready=times)


def grouped(values: Mapping[int, Tree]) -> list[Block]:
    """Return blocks in which clients with the same value are together, so that engines can compute on it once."""
    groups: dict[int, list[int]] = {}
    for j, value in values.items():
        groups.setdefault(value if isinstance(value, int) else id(value), []).append(j)
    return [Block(tuple(ids), values[ids[0]], stacked=False) for ids in groups.values()]


def united(*values: PerClient[T]) -> PerClient[T]:
    """Return the values of different clients at one place as one value."""
    times = {j: second for v in values for j, second in v.ready.items()}
    return PerClient(values[0].place, [b for v in values for b in v.blocks], ready=times)


def at_once(values: Sequence[PerClient], last: float) -> tuple[PerClient, ...]:
    """Return the same values, available at this second."""
    return tuple(
        PerClient(v.place, v.blocks, v.ids, v.kind, dict.fromkeys(v.ids, last) if last else ALWAYS) for v in values
    )


def common(values: Sequence[PerClient], ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ids that every value has; a client that disconnected is absent."""
    for v in values:
        if v.ids != ids:
            have = set(v.ids)
            ids = tuple(j for j in ids if j in have)
    return ids


def aligned(values: Sequence[PerClient], ids: tuple[int, ...]) -> list[tuple[tuple[int, ...], list[Block]]]:
    """Return the groups of clients that share a block in every argument, with those blocks."""
    if all(len(v.blocks) == 1 and v.blocks[0].ids == ids for v in values):
        return [(ids, [v.blocks[0] for v in values])] if ids else []
    homes = [{j: k for k, b in enumerate(v.blocks) for j in b.ids} for v in values]
    groups: dict[tuple[int, ...], list[int]] = {}
    for j in ids:
        groups.setdefault(tuple(home[j] for home in homes), []).append(j)
    return [
        (tuple(members), [v.blocks[k].take(tuple(members)) for v, k in zip(values, place, strict=True)])
        for place, members in groups.items()
    ]


def settled(value: Any) -> Any:
    """Return the same values, available from the beginning: a round's results are there when the next one starts."""
    return tree.replace(Held, lambda held: replace(held, ready=0.0), value)


def pair(value: PerClient) -> tuple[PerClient, PerClient]:
    """Return the two values of a function that gives a pair."""
    first, second = (
        PerClient(value.place, [b._replace(tree=b.tree[k]) for b in value.blocks], value.ids, ready=value.ready)
        for k in range(2)
    )
    return first, second
