"""Seeds the generators of torch, numpy and Python, from which users' own functions draw."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def drawing_from(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Let the block draw its random numbers from this seed, and restore the generators after it."""
    python, arrays = random.getstate(), np.random.get_state()
    cuda = [] if device is None or device.type != "cuda" else [device]
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
