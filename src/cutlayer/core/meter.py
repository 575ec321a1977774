"""Meters, which are told of every crossing, and timers, which say when a value will be available."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import Kind, Place
from cutlayer.core.values import Block, PerClient

Direction = Literal["up", "down"]
How = Literal["call", "vjp", "grad"]
Ready = Mapping[int, float]  # by client: the simulated second at which its value is available


@runtime_checkable
class Restorable(Protocol):
    """Something whose content can be saved and restored."""

    def content(self) -> Any: ...

    def restore(self, content: Any) -> None: ...


@runtime_checkable
class Reporting(Protocol):
    """A meter that adds figures to the metrics file."""

    def metrics(self) -> dict[str, Any]:
        """Return the figures to add to a round's record, by name."""


@runtime_checkable
class Meter(Protocol):
    """Told of every crossing that the laws allow.

    A round may be retried; a meter that is `Restorable`, such as the ledger, is rolled back before that.
    """

    def stepped(self, sizes: Mapping[int, int]) -> None:
        """These clients begin a step, with this many samples each."""

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        """Each client in the value sent it up to, or got it down from, the home of the kind."""

    def waited(self, ids: tuple[int, ...]) -> None:
        """A server waited for these clients: one round trip each."""

    def sent(self, kind: Kind, origin: Place, to: Place, value: PerClient) -> None:
        """Rows went from one server to the other: one for each client, or a single one for an aggregate."""


class Timer:
    """Says when values will be available. This one, for runs without devices, says "at once"; `Clock` simulates time.

    Times are given by client; the value of a client that is not named is available already.
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
        """A server has run fn, or a pullback, on single values that are available at these times."""
        return 0.0

    def moved(self, kind: Kind, direction: Direction, value: PerClient) -> Ready:
        """A value of each client has gone up or down."""
        return {}

    def sent(self, kind: Kind, origin: Place, value: PerClient) -> Ready:
        """Rows have gone from this server to the other."""
        return {}

    def last(self, rows: PerClient) -> float:
        """Return when the last of the rows is available."""
        return 0.0

    def wait(self, ids: Ids) -> None:
        """These clients wait for each other."""
