"""Batch sizes that a method sets for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cutlayer.core.checks import is_number
from cutlayer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Regulated:
    """MergeSFL: the fastest client of the round gets the largest batch, the others what they process in that time."""

    seconds: tuple[float, ...]  # by client number: computation and transfer of one sample
    largest: int | None = None  # the run's batch size by default
    ingress: int | None = None  # most samples that the server accepts in a step

    def __post_init__(self) -> None:
        if not self.seconds or not all(is_number(s) and s > 0 for s in self.seconds):
            raise ConfigError("regulated batch sizes need the seconds per sample of every client, each above 0")
        if any(limit is not None and limit < 1 for limit in (self.largest, self.ingress)):
            raise ConfigError("regulated batch sizes: largest and ingress must be at least 1")

    def __call__(self, ids: Sequence[int], default: int) -> Mapping[int, int]:
        missing = [j for j in ids if j >= len(self.seconds)]
        if missing:
            raise ConfigError(
                f"regulated batch sizes: no seconds per sample for client {missing[0]}; {len(self.seconds)} were given"
            )
        fastest, largest = min(self.seconds[j] for j in ids), self.largest or default
        sizes = {j: max(1, int(largest * (fastest / self.seconds[j]))) for j in ids}
        return sizes if self.ingress is None else _within(self.ingress, sizes)


def _within(ingress: int, sizes: Mapping[int, int]) -> Mapping[int, int]:
    """Scale the sizes down to what the server accepts, in the same proportions up to rounding."""
    if ingress < len(sizes):
        raise ConfigError(
            f"regulated batch sizes: ingress is {ingress}, but each of the round's {len(sizes)} clients sends at least "
            f"one sample a step; give an ingress of at least {len(sizes)}, or fewer clients a round"
        )
    total = sum(sizes.values())
    if total <= ingress:
        return sizes
    scaled = {j: max(1, b * ingress // total) for j, b in sizes.items()}
    while sum(scaled.values()) > ingress:  # at least one sample for each may be too many: shrink the largest
        scaled[max(scaled, key=lambda j: scaled[j])] -= 1
    return scaled
