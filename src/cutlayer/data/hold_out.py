"""Samples that clients keep for tests of their own."""

import numpy as np

from cutlayer.core.batches import Index
from cutlayer.core.keys import generator
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError


def hold_out(partition: Partition, fraction: float, key: int) -> tuple[Partition, Partition]:
    """Divide each client's samples at random: return those it trains on, and the fraction that it tests on.

    Both have at least one sample, training at least two; a client with fewer than three samples only trains.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"hold_out is {fraction}; give a fraction between 0 and 1")
    divided = [divide(len(index), fraction, key, j) for j, index in enumerate(partition.clients)]
    kept, held = (
        tuple(index[places[side]] for index, places in zip(partition.clients, divided, strict=True)) for side in (0, 1)
    )
    return Partition(kept, partition.names), Partition(held, partition.names)


def divide(num: int, fraction: float, key: int, client: int) -> tuple[Index, Index]:
    """Return which of its samples a client trains on, and which it holds out; a device does this by itself."""
    num_held = min(max(round(fraction * num), 1), max(num - 2, 0))
    order = generator(key, "hold_out", client).permutation(num)
    return np.sort(order[num_held:]), np.sort(order[:num_held])
