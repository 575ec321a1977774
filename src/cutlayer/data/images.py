"""Stored images to samples: scaled to [0, 1], then standardised per channel with the training set's own pixels."""

import numpy as np
import torch
from numpy.typing import NDArray

from cutlayer.data.arrays import Arrays
from cutlayer.data.files import Bytes, Images, Sets
from cutlayer.errors import DataError

Table = NDArray[np.float32]


def standardised(name: str, sets: Sets, num_classes: int, white: int = 255) -> tuple[Arrays, Arrays]:
    """The training and the test set as float32; white is the largest pixel value."""
    tables = _standard_values(sets.train.x, white)
    return (
        _arrays(f"{name}, training set", sets.train, tables, num_classes),
        _arrays(f"{name}, test set", sets.test, tables, num_classes),
    )


def _standard_values(x: Bytes, white: int) -> list[Table]:
    """For each channel, what each pixel value becomes; from counts of the values, so without a float copy."""
    values = np.arange(256) / white
    tables = []
    for channel in range(x.shape[1]):
        counts = np.bincount(x[:, channel].reshape(-1), minlength=256)
        mean = values @ counts / max(counts.sum(), 1)
        std = np.sqrt((values - mean) ** 2 @ counts / max(counts.sum(), 1))
        tables.append(((values - mean) / (std or 1.0)).astype(np.float32))
    return tables


def _arrays(where: str, images: Images, tables: list[Table], num_classes: int) -> Arrays:
    x = np.empty(images.x.shape, dtype=np.float32)
    for channel, table in enumerate(tables):
        x[:, channel] = table[images.x[:, channel]]
    try:
        return Arrays(x=torch.from_numpy(x), y=torch.tensor(images.y), num_classes=num_classes)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
