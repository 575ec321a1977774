"""Random numbers from keys: (seed, purpose, round, step, client) gives the same numbers on every engine.

No generator is stored, so engines, processes and resumed runs agree.
"""

from hashlib import blake2b

import numpy as np


def fold(key: int, *path: int | str) -> int:
    """Derive a new key from a key and a path of names and numbers."""
    text = "/".join([str(key), *(str(p) for p in path)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1  # fits a signed 64-bit seed


def of_step(key: int, number: int, client: int) -> int:
    """Return the key of a client in step `number` of the round that has this key."""
    return fold(key, "step", number, client)


def generator(key: int, *path: int | str) -> np.random.Generator:
    """Return a numpy generator for this key, the same on every machine."""
    return np.random.Generator(np.random.Philox(fold(key, *path)))
