"""Randomness is a function of a key: (seed, what for, round, step, client) gives the same numbers on every engine.

There are no stored generators, so engines, processes and resumed runs agree.
"""

from hashlib import blake2b

import numpy as np


def fold(key: int, *path: int | str) -> int:
    """A new key from a key and a path of names and numbers."""
    text = "/".join([str(key), *(str(p) for p in path)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1  # fits a signed 64-bit seed


def generator(key: int, *path: int | str) -> np.random.Generator:
    """A numpy generator for this key, the same on every machine."""
    return np.random.Generator(np.random.Philox(fold(key, *path)))
