"""Who is told of what happens between a server and its clients."""

from typing import Protocol


class Watcher(Protocol):
    """Told of every letter, answer and loss."""

    def asked(self, number: int, num_bytes: int) -> None:
        """A letter went to this client."""

    def told(self, number: int, num_bytes: int) -> None:
        """A letter went to it that wants no answer."""

    def answered(self, number: int, num_bytes: int, seconds: float) -> None:
        """Its answer came, after so long."""

    def slow(self, number: int) -> None:
        """It has missed its deadline."""

    def lost(self, number: int, reason: str) -> None:
        """It is out of the round."""

    def refused(self, number: int, reason: str) -> None:
        """What it sent cannot be used, so it is out of the round."""


class Nobody:
    """Does not look."""

    def asked(self, number: int, num_bytes: int) -> None:
        pass

    told = asked

    def answered(self, number: int, num_bytes: int, seconds: float) -> None:
        pass

    def slow(self, number: int) -> None:
        pass

    def lost(self, number: int, reason: str) -> None:
        pass

    def refused(self, number: int, reason: str) -> None:
        pass
