"""Which clients take part in a round, and in which order."""

from collections.abc import Callable, Sequence

from cutlayer import registry
from cutlayer.core import keys


def uniform(ids: Sequence[int], num: int, key: int) -> tuple[int, ...]:
    """Draw `num` clients uniformly without replacement; return them in ascending order."""
    chosen = keys.generator(key, "sample").permutation(len(ids))[:num]
    return tuple(sorted(ids[k] for k in chosen))


Sampler = Callable[[Sequence[int], int, int], tuple[int, ...]]  # (clients, number to draw, key) -> clients of the round
SAMPLERS: registry.Table[Sampler] = registry.table("SAMPLERS", {"uniform": uniform})


def shuffled(ids: Sequence[int], key: int, *path: int | str) -> tuple[int, ...]:
    """Return the clients in a random order."""
    return tuple(ids[k] for k in keys.generator(key, "order", *path).permutation(len(ids)))
