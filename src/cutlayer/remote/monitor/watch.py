"""Watchers, which a server informs about the traffic with its clients."""

from typing import Any, Protocol


class Watcher(Protocol):
    """Is informed about every request, answer and loss."""

    def asked(self, number: int, num_bytes: int) -> None:
        """A request went to the client of this number."""

    def sent(self, number: int, num_bytes: int) -> None:
        """A message that needs no answer went to the client."""

    def answered(self, number: int, num_bytes: int, seconds: float) -> None:
        """The client's answer came, this long after the request."""

    def slow(self, number: int) -> None:
        """The client has missed its deadline."""

    def lost(self, number: int, reason: str) -> None:
        """The client is out of the round."""

    def refused(self, number: int, reason: str) -> None:
        """The client sent something unusable, so it is out of the round."""


class NoWatcher:
    """Ignores everything."""

    def asked(self, *event: Any, **more: Any) -> None:
        pass

    sent = answered = slow = lost = refused = asked
