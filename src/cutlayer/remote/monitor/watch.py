"""Who is told of what happens between a server and its clients."""

from typing import Any, Protocol


class Watcher(Protocol):
    """Told of every request, answer and loss."""

    def asked(self, number: int, num_bytes: int) -> None:
        """A request went to this client."""

    def told(self, number: int, num_bytes: int) -> None:
        """A request went to it that wants no answer."""

    def answered(self, number: int, num_bytes: int, seconds: float) -> None:
        """Its answer came, after so long."""

    def slow(self, number: int) -> None:
        """It has missed its deadline."""

    def lost(self, number: int, reason: str) -> None:
        """It is out of the round."""

    def refused(self, number: int, reason: str) -> None:
        """What it sent cannot be used, so it is out of the round."""


class NoWatcher:
    """Ignores everything."""

    def asked(self, *event: Any, **more: Any) -> None:
        pass

    told = answered = slow = lost = refused = asked
