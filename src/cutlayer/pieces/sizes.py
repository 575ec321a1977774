"""Batch sizes that a method regulates, client by client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cutlayer.errors import ConfigError


class Sizes(Protocol):
    """The batch sizes of these clients; a client that is not named keeps the run's."""

    def __call__(self, ids: Sequence[int]) -> Mapping[int, int]: ...


@dataclass(frozen=True)
class Equal:
    """Everyone keeps the run's batch size."""

    def __call__(self, ids: Sequence[int]) -> Mapping[int, int]:
        return {}


@dataclass(frozen=True, kw_only=True)
class Regulated:
    """MergeSFL: the fastest client of the round gets the largest batch, the others as much as they do in that time."""

    seconds: tuple[float, ...]  # computation and transfer of one sample, by client number
    largest: int
    ingress: int | None = None  # most samples that the server takes in a step

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ConfigError("regulated batch sizes need the seconds per sample of every client, each above 0")
        if self.largest < 1 or (self.ingress is not None and self.ingress < 1):
            raise ConfigError("regulated batch sizes: largest and ingress must be at least 1")

    def __call__(self, ids: Sequence[int]) -> Mapping[int, int]:
        missing = [j for j in ids if j >= len(self.seconds)]
        if missing:
            raise ConfigError(
                f"regulated batch sizes: no seconds per sample for client {missing[0]}; {len(self.seconds)} were given"
            )
        fastest = min(self.seconds[j] for j in ids)
        sizes = {j: max(1, int(self.largest * (fastest / self.seconds[j]))) for j in ids}
        total = sum(sizes.values())
        if self.ingress is None or total <= self.ingress:
            return sizes
        return {j: max(1, b * self.ingress // total) for j, b in sizes.items()}
