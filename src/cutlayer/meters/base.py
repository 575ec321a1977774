"""What a meter is told."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from cutlayer.kinds import Kind, Place
from cutlayer.values import PerClient

Direction = Literal["up", "down"]


@runtime_checkable
class Restorable(Protocol):
    """Something that can be put back to where it was."""

    def content(self) -> Any: ...

    def restore(self, content: Any) -> None: ...


class Meter(Protocol):
    """Told of every crossing, once it is allowed.

    A round may be played again; a meter that is `Restorable`, as the ledger is, is put back to where it was before it.
    """

    def stepped(self, sizes: Mapping[int, int]) -> None:
        """These clients begin a step, each with so many samples."""

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        """A value of each client in it went up to, or down from, the kind's home."""

    def waited(self, ids: tuple[int, ...]) -> None:
        """A server waited for these clients: one round trip each."""

    def sent(self, kind: Kind, origin: Place, to: Place, value: PerClient) -> None:
        """Rows went from one server to the other: of each client, or one of none, which is an aggregate."""
