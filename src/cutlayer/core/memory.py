"""Values that clients keep between rounds, each under a name and with a version.

In a simulation this module stores them, and clients whose values are equal to the last bit share one copy. On devices
each client stores its own values and reports their versions when it joins.
"""

from typing import Any, NamedTuple, Protocol

from cutlayer.core import tree
from cutlayer.core.tree import Tree
from cutlayer.core.values import PerClient, grouped
from cutlayer.errors import LawError


class Kept(NamedTuple):
    """The value of one client."""

    version: int
    value: Tree
    ready: float = 0.0  # the simulated second at which it became available


class Recall(Protocol):
    """The values that some clients keep: `clients.memory`."""

    def versions(self, name: str) -> dict[int, int]:
        """Return, by client, the version that it reports; clients without such a value are left out."""

    def recall(self, name: str) -> PerClient:
        """Return the values of the clients that hold one, at the clients."""

    def keep(self, name: str, value: PerClient, version: int) -> PerClient:
        """Let each client keep its value, and return the values as they are kept."""


class Keeps(Protocol):
    """The store of the clients' values."""

    def at(self, ids: tuple[int, ...]) -> Recall:
        """Return what these clients keep."""


def check_kept(value: PerClient) -> None:
    """Refuse to keep a value that a server holds, and a client's own data."""
    if value.place != "clients":
        raise LawError(f"clients keep only what they hold, but this value is at the {value.place}; send it first")
    if any(b.raw is not None for b in value.blocks):
        raise LawError("a client's own data are there already; what it keeps is what came of them")


class Memory:
    """The clients' values in this process, by name and client."""

    def __init__(self) -> None:
        self._kept: dict[str, dict[int, Kept]] = {}

    def of(self, name: str) -> dict[int, Kept]:
        return self._kept.setdefault(name, {})

    def at(self, ids: tuple[int, ...]) -> Recall:
        return Memories(self, ids)

    def content(self) -> dict[str, Any]:
        """Return the content for a checkpoint; values that clients share are stored once."""
        content = {}
        for name, kept in self._kept.items():
            values = tuple({id(k.value): k.value for k in kept.values()}.values())
            places = {id(value): i for i, value in enumerate(values)}
            who = {j: (k.version, places[id(k.value)]) for j, k in kept.items()}
            content[name] = {"values": values, "clients": who}
        return content

    def restore(self, content: dict[str, Any]) -> None:
        """Continue from the content of a checkpoint."""
        self._kept = {
            name: {j: Kept(version, stored["values"][i]) for j, (version, i) in stored["clients"].items()}
            for name, stored in content.items()
        }


class Memories:
    """The values that some clients keep in this process."""

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
                    # Copied tensors, as a checkpoint would restore them.
                    same = tree.owned(own)
                    known.insert(0, same)
                kept[j] = Kept(version, same, value.ready.get(j, 0.0))
        return _shared({j: kept[j] for j in value.ids if j in self._ids})


def _shared(kept: dict[int, Kept]) -> PerClient:
    """Put clients that share a value into one block, so that engines compute on it once."""
    blocks = grouped({j: own.value for j, own in kept.items()})
    return PerClient("clients", blocks, kept, ready={j: own.ready for j, own in kept.items() if own.ready})
