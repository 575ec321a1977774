"""Named image data sets: one built in, the others read from files that are already on disk.

Images come out as float32 (samples, channels, height, width): scaled to [0, 1], then standardised per channel with the
mean and the standard deviation of the training set's own pixels.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from cutlayer.data import cifar
from cutlayer.data.arrays import Arrays
from cutlayer.data.files import Bytes, Form, Images, Sets, idx, npz
from cutlayer.errors import DataError, UnknownNameError

Table = NDArray[np.float32]

ROOT_VARIABLE = "CUTLAYER_DATA"
HOW_TO_SET = f"point {ROOT_VARIABLE} or --data at"


@dataclass(frozen=True)
class Dataset:
    """A data set with its published division."""

    name: str
    train: Arrays
    test: Arrays


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a named data set comes from."""

    sets: Callable[[str, Path | None], Sets]  # from its name and the data folder
    num_classes: int
    white: int = 255  # the largest pixel value


def names() -> list[str]:
    """The data sets that can be loaded."""
    return list(SOURCES)


def load(name: str, root: Path | None = None) -> Dataset:
    """A data set by name; its files are looked for under root, by default the folder in CUTLAYER_DATA."""
    if name not in SOURCES:
        raise UnknownNameError("data set", name, SOURCES)
    source = SOURCES[name]
    if root is None and os.environ.get(ROOT_VARIABLE):
        root = Path(os.environ[ROOT_VARIABLE])
    sets = source.sets(name, root)
    tables = _standard_values(sets.train.x, source.white)
    return Dataset(
        name,
        _arrays(f"{name}, training set", sets.train, tables, source.num_classes),
        _arrays(f"{name}, test set", sets.test, tables, source.num_classes),
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


def _digits(_: str, __: Path | None) -> Sets:
    """The built-in digits; of each class every fifth image is test data, so 1437 train and 360 test."""
    with (files("cutlayer.data") / "digits.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        x, y = file["images"], file["labels"].astype(np.int64)
    is_test = np.zeros(len(y), dtype=bool)
    is_test[np.argsort(y, kind="stable")[::5]] = True
    return Sets(Images(x[~is_test], y[~is_test]), Images(x[is_test], y[is_test]))


def _from_files(*forms: Form, folders: tuple[str, ...] = ("",)) -> Callable[[str, Path | None], Sets]:
    """The first form that is found, folder by folder."""

    def sets(name: str, root: Path | None) -> Sets:
        expected = _either([form.expected for form in forms])
        if root is None:
            raise DataError(f"{name}: no data folder is set; {HOW_TO_SET} the folder that holds {expected}.")
        searched = [root / folder for folder in folders if folder or not _is_of_another(root, name)]
        for folder in searched:
            for form in forms:
                if (found := form.read(folder)) is not None:
                    return found
        raise DataError(
            f"{name}: no data files under {_either([str(folder) for folder in searched])}; expected {expected}. "
            f"Put them there, or {HOW_TO_SET} their folder."
        )

    return sets


def _is_of_another(root: Path, name: str) -> bool:
    """Whether root is by its name the folder of another data set: MNIST and Fashion-MNIST share their file names."""
    path = root.resolve()
    return any(path.match(folder) for other, folders in FOLDERS.items() if other != name for folder in folders)


def _either(options: list[str]) -> str:
    return " or ".join(part for part in (", ".join(options[:-1]), options[-1]) if part)


GREY = (1, 28, 28)
# A folder of the set's own name goes before files that lie in the data folder itself.
FOLDERS = {"mnist": ("mnist", "MNIST/raw"), "fashion_mnist": ("fashion_mnist", "FashionMNIST/raw")}

SOURCES: dict[str, Source] = {
    "digits": Source(sets=_digits, num_classes=10, white=16),
    **{
        name: Source(sets=_from_files(npz(name, GREY), idx(GREY), folders=(*folders, "")), num_classes=10)
        for name, folders in FOLDERS.items()
    },
    "cifar10": Source(sets=_from_files(npz("cifar10", cifar.SHAPE), *cifar.CIFAR10), num_classes=10),
    "cifar100": Source(sets=_from_files(npz("cifar100", cifar.SHAPE), *cifar.CIFAR100), num_classes=100),
}
