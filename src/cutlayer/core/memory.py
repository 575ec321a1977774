"""What clients keep between rounds: each value under a name, with a version that says how far it has come.

In a simulation the clients' values lie here, and clients whose values are equal to the last bit share one copy. On
devices each client keeps its own, and states its versions when it joins.
"""

from typing import Any, NamedTuple, Protocol

from cutlayer.core import tree
from cutlayer.core.tree import Tree
from cutlayer.core.values import PerClient, grouped
from cutlayer.errors import LawError


class Kept(NamedTuple):
    """One client's value."""

    version: int
    value: Tree
    ready: float = 0.0  # the simulated second since which it is there


class Recall(Protocol):
    """What some clients keep: `clients.memory`."""

    def versions(self, name: str) -> dict[int, int]:
        """The version of those clients that hold such a value, as they state it."""

    def recall(self, name: str) -> PerClient:
        """The values of those clients that hold one, at the clients."""

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        """Let each client keep its value; the same values, in memory of their own, come back."""


class Keeps(Protocol):
    """Where clients keep their values."""

    def at(self, ids: tuple[int, ...]) -> Recall:
        """What these clients keep."""


def check_kept(value: PerClient) -> None:
    """Clients cannot keep what a server holds."""
    if value.place != "clients":
        raise LawError(f"clients keep only what they hold, but this value is at the {value.place}; send it first")
    if any(b.raw is not None for b in value.blocks):
        raise LawError("a client's own data are there already; what it keeps is what came of them")


class Memory:
    """The clients' values, by name and client."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, Kept]] = {}

    def of(self, name: str) -> dict[int, Kept]:
        return self._kept.setdefault(name, {})

    def at(self, ids: tuple[int, ...]) -> Recall:
        return Memories(self, ids)

    def fork(self) -> "Memory":
        """A copy for a round that is only tried."""
        other = Memory()
        other._kept = {name: dict(kept) for name, kept in self._kept.items()}
        return other

    def content(self) -> dict[str, Any]:
        """For a checkpoint; values that clients share are stored once."""
        content = {}
        for name, kept in self._kept.items():
            values = tuple({id(k.value): k.value for k in kept.values()}.values())
            places = {id(value): i for i, value in enumerate(values)}
            who = {j: (k.version, places[id(k.value)]) for j, k in kept.items()}
            content[name] = {"values": values, "clients": who}
        return content

    def restore(self, content: dict[str, Any]) -> None:
        """Go on from these values."""
        self._kept = {
            name: {j: Kept(version, stored["values"][i]) for j, (version, i) in stored["clients"].items()}
            for name, stored in content.items()
        }


class Memories:
    """What some clients keep here."""

    def __init__(self, memory: Memory, ids: tuple[int, ...]) -> None:
        self._memory, self._ids = memory, ids

    def versions(self, name: str) -> dict[int, int]:
        kept = self._memory.of(name)
        return {j: kept[j].version for j in self._ids if j in kept}

    def recall(self, name: str) -> PerClient:
        kept = self._memory.of(name)
        return _shared({j: kept[j] for j in self._ids if j in kept})

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        check_kept(value)
        kept = self._memory.of(name)
        known = [k.value for k in kept.values() if k.version == version]
        for j, own in ((j, block.row(j)) for block in value.blocks for j in block.ids):
            if j in self._ids:
                same = next((other for other in known if tree.equal(other, own)), None)
                if same is None:
                    # Tensors of their own, as a checkpoint would give back.
                    same = tree.owned(own)
                    known.insert(0, same)
                kept[j] = Kept(version, same, value.ready.get(j, 0.0))
        return _shared({j: kept[j] for j in value.ids if j in self._ids})


def _shared(kept: dict[int, Kept]) -> PerClient:
    """Clients that share a value sit together, so that what is computed from it is computed once."""
    blocks = grouped({j: own.value for j, own in kept.items()})
    return PerClient("clients", blocks, kept, ready={j: own.ready for j, own in kept.items() if own.ready})
