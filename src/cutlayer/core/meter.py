"""What watches the verbs: meters are told of every crossing, timers say when a value will be there."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.values import Block, PerClient

Direction = Literal["up", "down"]
How = Literal["call", "vjp", "grad"]
Ready = Mapping[int, float]  # by client: the simulated second at which its value is there


@runtime_checkable
class Restorable(Protocol):
    """Something that can be put back to where it was."""

    def content(self) -> Any: ...

    def restore(self, content: Any) -> None: ...


@runtime_checkable
class Reporting(Protocol):
    """A meter with figures of its own for the metrics file."""

    def metrics(self) -> dict[str, Any]:
        """What a round's record holds besides, by name."""


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


class Timer:
    """Says when values will be there: here at once, as in a run without devices; `meters.Clock` simulates time.

    Times are given by client; a client that is not named is there already.
    """

    def worked(self, how: How, fn: Fn, values: Sequence[PerClient], ids: Ids, made: Sequence[Block]) -> Ready:
        """The clients have run fn on these values."""
        return {}

    def pulled(self, pullbacks: PerClient, gradient: PerClient, ids: Ids) -> Ready:
        """The clients have run these pullbacks."""
        return {}

    def served(self, how: How, fn: Fn, values: Sequence[PerClient], ids: Ids, made: Sequence[Block]) -> Ready:
        """The training server has run fn on rows, side by side."""
        return {}

    def served_pull(self, pullbacks: PerClient, gradient: PerClient, ids: Ids) -> Ready:
        """The training server has run the pullbacks of rows."""
        return {}

    def done(self, how: How, fn: Fn, values: Sequence[Any], ready: Sequence[float], pull: Any = None) -> float:
        """A server has run fn, or a pullback, on single values that are there at these times."""
        return 0.0

    def moved(self, kind: Kind, direction: Direction, value: PerClient) -> Ready:
        """A value of each client has gone up or down."""
        return {}

    def sent(self, kind: Kind, origin: Place, value: PerClient) -> Ready:
        """Rows have gone from this server to the other."""
        return {}

    def last(self, rows: PerClient) -> float:
        """All rows are there."""
        return 0.0

    def wait(self, ids: Ids) -> None:
        """These clients wait for each other."""
