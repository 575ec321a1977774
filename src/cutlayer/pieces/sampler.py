"""Which clients take part in a round, and in which order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from cutlayer import registry
from cutlayer.core import keys
from cutlayer.core.checks import check, check_choice, is_number
from cutlayer.errors import ConfigError
from cutlayer.pieces.trace import check_clients, digest, read_trace

MOST_WAITS = 10_000  # draws until enough clients are available


class Draw(NamedTuple):
    """What a sampler draws from."""

    samples: Mapping[int, int]  # the sample count of each client that could take part
    num: int  # how many to draw
    key: int  # of the round
    round: int = 0  # from 0
    fewest: int = 1  # clients that the method needs in a round


Sampler = Callable[[Draw], tuple[int, ...]]  # returns the clients of the round


@dataclass(frozen=True)
class UniformDraw:
    """All clients are equally likely; drawn without replacement."""

    def __call__(self, draw: Draw) -> tuple[int, ...]:
        ids = tuple(draw.samples)
        chosen = keys.generator(draw.key, "sample").permutation(len(ids))[: draw.num]
        return tuple(sorted(ids[k] for k in chosen))


@dataclass(frozen=True)
class WeightedDraw:
    """Clients are drawn one after another, each time with chances in proportion to their samples."""

    def __call__(self, draw: Draw) -> tuple[int, ...]:
        # The first of several exponential clocks to ring is one with a chance in proportion to its rate.
        times = keys.generator(draw.key, "sample").exponential(size=len(draw.samples))
        order = np.argsort(times / np.array(list(draw.samples.values()), dtype=np.float64), kind="stable")
        ids = tuple(draw.samples)
        return tuple(sorted(ids[k] for k in order[: draw.num]))


uniform, weighted = UniformDraw(), WeightedDraw()
AMONG: dict[str, Sampler] = {"uniform": uniform, "weighted": weighted}


@dataclass(frozen=True)
class Available:
    """Only clients that are on take part: with a probability in each round, or as a trace file says (client, rounds).

    If fewer are on than a round has, all of them take part. If fewer are on than the method needs, the round waits: for
    another draw, or for the next round of the trace in which enough are on.
    """

    probability: float | None = None
    trace: str | None = None  # a CSV file with the columns client, from_round, to_round; in the working folder
    among: Literal["uniform", "weighted"] = "uniform"  # how the clients of a round are drawn from those that are on

    def __post_init__(self) -> None:
        if (self.probability is None) == (self.trace is None):
            raise ConfigError("availability needs a probability or a trace; give one of them")
        if self.probability is not None:
            fits = is_number(self.probability) and 0 < self.probability <= 1
            check(fits, "probability", self.probability, "a number above 0 and up to 1")
        check_choice("among", self.among, Literal["uniform", "weighted"])

    @cached_property
    def intervals(self) -> Mapping[int, Sequence[tuple[int, int]]]:
        """The rounds, from 1, in which each client of the trace is on: the first and the last of each stretch."""
        return read_trace(Path(self.trace or ""))

    def check(self, num_clients: int) -> None:
        """Refuse a trace of other clients than these."""
        if self.trace is not None:
            check_clients(Path(self.trace), self.intervals, num_clients)

    def __call__(self, draw: Draw) -> tuple[int, ...]:
        for wait in range(self._waits(draw.round)):
            on = {j: num for j, num in draw.samples.items() if self._is_on(j, draw, wait)}
            if len(on) >= draw.fewest:
                return AMONG[self.among](draw._replace(samples=on, num=min(draw.num, len(on))))
        when = f"in {MOST_WAITS} draws for" if self.trace is None else f"in {self.trace} from"
        raise ConfigError(
            f"{when} round {draw.round + 1} on, fewer clients are on than the {draw.fewest} that a round needs; let "
            "more be on, or train fewer rounds"
        )

    def _waits(self, round: int) -> int:
        if self.trace is None:
            return MOST_WAITS
        return max((last for some in self.intervals.values() for _, last in some), default=0) - round

    def _is_on(self, client: int, draw: Draw, wait: int) -> bool:
        if self.probability is not None:
            return bool(keys.generator(draw.key, "available", wait, client).random() < self.probability)
        now = draw.round + 1 + wait
        return any(first <= now <= last for first, last in self.intervals.get(client, ()))


SAMPLERS: registry.Table[Callable[..., Sampler]] = registry.table(
    "SAMPLERS", {"uniform": UniformDraw, "weighted": WeightedDraw, "availability": Available}
)


def digests(sampler: Sampler) -> dict[str, str]:
    """Return the digest of the file that a sampler reads, if it reads one; a resumed run compares it."""
    trace = sampler.trace if isinstance(sampler, Available) else None
    return {} if trace is None else {f"the trace {trace}": digest(Path(trace))}


def shuffled(ids: Sequence[int], key: int, *path: int | str) -> tuple[int, ...]:
    """Return the clients in a random order."""
    return tuple(ids[k] for k in keys.generator(key, "order", *path).permutation(len(ids)))
