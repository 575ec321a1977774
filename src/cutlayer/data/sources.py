"""Named data sets: one built in, the others read from files that are already on disk.

Images become float32 (samples, channels, height, width), scaled to [0, 1] and then standardised per channel with the
training set. Recordings become images of their log-mel energies (`speech`), texts become indices of characters
(`shakespeare`) or, for language models, the tokens of a tokenizer (`language`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cutlayer import registry
from cutlayer.core.checks import check_type
from cutlayer.data import cifar, language, pictures, shakespeare, speech
from cutlayer.data.arrays import Arrays
from cutlayer.data.files import Bytes, FileForm, Images, Read, Sets, idx, npz
from cutlayer.errors import DataError

ROOT_VARIABLE = "CUTLAYER_DATA"
HOW_TO_SET = f"point {ROOT_VARIABLE} or --data at"


@dataclass(frozen=True)
class Dataset:
    """A data set with its training and its test set."""

    name: str
    train: Arrays
    test: Arrays


Source = Callable[[Path | None], Dataset]  # loads a data set; given the data folder, if there is one


def names() -> list[str]:
    """Return the names of the data sets that can be loaded."""
    return list(DATA)


def load(name: str, root: Path | None = None) -> Dataset:
    """Load a data set by name; its files are searched under root, by default the folder in CUTLAYER_DATA."""
    found = registry.find("data set", DATA, name)(data_folder(root))
    check_type(f"what the data set {name!r} gives", found, Dataset, "with its training and its test samples")
    return found


def task(name: str, root: Path | None = None) -> language.Texts:
    """Load the texts of a task by name; `encode` turns them into arrays with a tokenizer."""
    return registry.find("task", TASKS, name)(name, data_folder(root))


def tokenised(name: str, tokenizer: Any, root: Path | None = None, max_length: int = language.MAX_LENGTH) -> Dataset:
    """Load a task as a data set of tokens."""
    return Dataset(name, *task(name, root).encode(tokenizer, max_length))


def data_folder(given: Path | None = None) -> Path | None:
    """Return the given folder, or the one in CUTLAYER_DATA."""
    if given is not None and given.is_file():
        raise DataError(f"{given} is a file; data sets are looked for in a folder")
    return given or (Path(os.environ[ROOT_VARIABLE]) if os.environ.get(ROOT_VARIABLE) else None)


def located(file: str, root: Path | None) -> Path:
    """Return the file or folder of this name in the working folder or, if there is none, in the data folder."""
    folder = data_folder(root)
    below = None if folder is None else folder / file
    return below if below is not None and below.exists() and not Path(file).exists() else Path(file)


Reader = Callable[[str, Path | None], tuple[Arrays, Arrays]]  # training and test set, from the name and the data folder


def _source(name: str, read: Reader) -> Source:
    return lambda root: Dataset(name, *read(name, root))


def _standardised(name: str, sets: Sets, num_classes: int, white: int = 255) -> tuple[Arrays, Arrays]:
    """Return the training and the test set as standardised float32; `white` is the largest pixel value."""
    tables = _standard_values(sets.train.x, white)
    return (
        _arrays(f"{name}, training set", sets.train, tables, num_classes),
        _arrays(f"{name}, test set", sets.test, tables, num_classes),
    )


def _standard_values(x: Bytes, white: int) -> list[NDArray[np.float32]]:
    """Return what each pixel value becomes, by channel; computed from counts, without a float copy of the images."""
    values = np.arange(256) / white
    tables = []
    for channel in range(x.shape[1]):
        counts = np.bincount(x[:, channel].reshape(-1), minlength=256)
        mean = values @ counts / max(counts.sum(), 1)
        std = np.sqrt((values - mean) ** 2 @ counts / max(counts.sum(), 1))
        tables.append(((values - mean) / (std or 1.0)).astype(np.float32))
    return tables


def _arrays(where: str, images: Images, tables: list[NDArray[np.float32]], num_classes: int) -> Arrays:
    x = np.empty(images.x.shape, dtype=np.float32)
    for channel, table in enumerate(tables):
        x[:, channel] = table[images.x[:, channel]]
    try:
        return Arrays(x=torch.from_numpy(x), y=torch.tensor(images.y), num_classes=num_classes)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _images(sets: Callable[[str, Path | None], Sets], num_classes: int, white: int = 255) -> Reader:
    return lambda name, root: _standardised(name, sets(name, root), num_classes, white)


def _digits(_: str, __: Path | None) -> Sets:
    """Return the built-in digits; every fifth image of a class is test data: 1437 to train and 360 to test."""
    with (files("cutlayer.data") / "digits.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        x, y = file["images"], file["labels"].astype(np.int64)
    is_test = np.zeros(len(y), dtype=bool)
    is_test[np.argsort(y, kind="stable")[::5]] = True
    return Sets(Images(x[~is_test], y[~is_test]), Images(x[is_test], y[is_test]))


def _from_files(*forms: FileForm[Read], folders: tuple[str, ...] = ("",)) -> Callable[[str, Path | None], Read]:
    """Return a reader of the first form that is found in these folders."""

    def read(name: str, root: Path | None) -> Read:
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

    return read


def _is_of_another(root: Path, name: str) -> bool:
    """Return whether root, by its name, belongs to another data set: MNIST and Fashion-MNIST share their file names."""
    path = root.resolve()
    return any(path.match(folder) for other, folders in FOLDERS.items() if other != name for folder in folders)


def _either(options: list[str]) -> str:
    return " or ".join(part for part in (", ".join(options[:-1]), options[-1]) if part)


GREY = (1, 28, 28)
# A folder with the name of the set takes precedence over files in the data folder itself.
FOLDERS = {"mnist": ("mnist", "MNIST/raw"), "fashion_mnist": ("fashion_mnist", "FashionMNIST/raw")}

SOURCES: dict[str, Reader] = {
    "digits": _images(_digits, 10, white=16),
    **{
        name: _images(_from_files(npz(name, GREY), idx(GREY), folders=(*folders, "")), 10)
        for name, folders in FOLDERS.items()
    },
    "cifar10": _images(_from_files(npz("cifar10", cifar.SHAPE), *cifar.CIFAR10), 10),
    "cifar100": _images(_from_files(npz("cifar100", cifar.SHAPE), *cifar.CIFAR100), 100),
    "tiny_imagenet": _images(_from_files(npz("tiny_imagenet", pictures.SHAPE), pictures.TINY_IMAGENET), 200),
    "ham10000": _images(
        _from_files(npz("ham10000", pictures.SHAPE), pictures.HAM10000, folders=("ham10000", "")),
        len(pictures.DIAGNOSES),
    ),
    "shakespeare": _from_files(*shakespeare.FORMS, folders=("shakespeare", "shakespeare/data", "")),
    "speech_commands": _from_files(speech.SPEECH_COMMANDS, folders=speech.FOLDERS),
}


def _task(name: str, definition: language.Definition) -> Callable[[str, Path | None], language.Texts]:
    read = _from_files(*language.TABLES[name], folders=(*definition.folders, ""))
    return lambda name, root: language.defined(name, read(name, root))


TASKS: dict[str, Callable[[str, Path | None], language.Texts]] = {
    **{name: _task(name, definition) for name, definition in language.DEFINITIONS.items()},
    "text": _from_files(language.TEXT),
}


def _is_text(name: str, _: Path | None) -> tuple[Arrays, Arrays]:
    raise DataError(f"{name} is text: use it with the model causal_lm, or task({name!r}).encode(tokenizer)")


DATA: registry.Table[Source] = registry.table(
    "DATA", {name: _source(name, read) for name, read in (SOURCES | dict.fromkeys(TASKS, _is_text)).items()}
)
