"""Samples that clients keep for tests of their own."""

import numpy as np

from cutlayer.core.keys import generator
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError


def hold_out(partition: Partition, fraction: float, key: int) -> tuple[Partition, Partition]:
    """Divide each client's samples at random: return those it trains on, and the fraction that it tests on.

    Both have at least one sample, training at least two; a client with fewer than three samples only trains.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"hold_out is {fraction}; give a fraction between 0 and 1")
    kept, held = [], []
    for j, index in enumerate(partition.clients):
        num = min(max(round(fraction * len(index)), 1), max(len(index) - 2, 0))
        order = generator(key, "hold_out", j).permutation(len(index))
        held.append(np.sort(index[order[:num]]))
        kept.append(np.sort(index[order[num:]]))
    return Partition(tuple(kept), partition.names), Partition(tuple(held), partition.names)
