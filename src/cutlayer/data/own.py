"""The data of a run that are one's own: a file or a folder, its targets, and what of it is the test set."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from cutlayer import registry
from cutlayer.core.checks import check, check_choice, is_number
from cutlayer.data import sources
from cutlayer.data.arrays import Arrays, Inputs, split_off
from cutlayer.data.columns import Columns, Stored, Task
from cutlayer.data.local import PAIRS, READERS, as_arrays, names_in, stored
from cutlayer.data.sources import DATA, Dataset, located
from cutlayer.errors import ConfigError, DataError

log = logging.getLogger("cutlayer")

HELD_OUT = ("test", "val", "validation", "dev")  # names of test sets; the first that is present
USUAL_TEST = 0.2
TEST_KEY = 0  # the test set is the same for every seed


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """A file or folder of samples; see `cutlayer.data.local` for its forms."""

    path: str  # in the working folder or in the data folder
    test: float | str | None = None  # share held out, or the path of the test samples; by default its own, or 0.2
    target: str | None = None  # the column or array of targets; by default label, labels, y or target
    features: tuple[str, ...] = ()  # the columns or arrays of inputs; by default all others
    group: str | None = None  # the column that says where a sample comes from, for the natural partition
    task: Task = "auto"  # classes if all targets are integers, else regression
    standardise: bool = False  # each feature or channel: subtract the training set's mean, divide by its deviation

    def __post_init__(self) -> None:
        check(bool(self.path), "path", self.path, "a file or a folder")
        if is_number(self.test):
            check(0 < self.test < 1, "test", self.test, "a fraction between 0 and 1, or a path")
        check_choice("task", self.task, Task)

    def __str__(self) -> str:
        return self.path

    @property
    def columns(self) -> Columns:
        return Columns(target=self.target, features=self.features, group=self.group, task=self.task)


def is_path(word: str) -> bool:
    """Return whether a word that names no data set is a path."""
    path = Path(word)
    return path.suffix.lower() in READERS or len(path.parts) > 1 or path.exists()


def load(name: str, root: Path | None = None, **options: Any) -> Dataset:
    """Load a data set by name, or one's own by its path with the options of `OwnData`.

    Files are searched under root, by default the folder in CUTLAYER_DATA; one's own first in the working folder.
    """
    if name in DATA and options:
        raise ConfigError(f"the data set {name!r} takes no options; leave out {', '.join(options)}")
    if name in DATA or not (options or is_path(name)):
        return sources.load(name, root)
    registry.check_options(f"the data {name!r}", registry.options_of(OwnData, ("path",)), options)
    return read(OwnData(path=name, **options), root)


def read(own: OwnData, root: Path | None = None) -> Dataset:
    """Read one's own data into a training and a test set."""
    columns = replace(own.columns, words=True)
    (place, first), *rest = [stored(path, None, some) for path, some in _sets(own, columns, root)]
    held = _numbered(place, [first, *(second for _, second in rest)])
    places = [place, *(other for other, _ in rest)]
    sets = [as_arrays(where, each, columns) for where, each in zip(places, held, strict=True)]
    if len(sets) == 1:
        share = own.test if isinstance(own.test, float) else USUAL_TEST
        sets = list(split_off(sets[0], share, TEST_KEY))
    train, test = _alike(own, *sets)
    if own.standardise:
        train, test = _standardised(train, test)
    if isinstance(first.y, Tensor):  # words can only be classes
        _say_task(own, train)
    return Dataset(str(own), train, test)


def _sets(own: OwnData, columns: Columns, root: Path | None) -> list[tuple[Path, Columns]]:
    """Return where the training and, if there is one, the test set are, with the columns to read there."""
    path = located(own.path, root)
    if isinstance(own.test, str):
        return [(_part(path, ("train",)) or path, columns), (located(own.test, root), columns)]
    pairs = _array_pairs(path) if own.target is None and not own.features else []
    found = [(path, replace(columns, target=y, features=(x,))) for x, y in pairs]
    if not found:
        parts = [_part(path, ("train",)), _part(path, HELD_OUT)]
        found = [(part, columns) for part in parts if part is not None] if all(parts) else [(path, columns)]
    return found[:1] if own.test is not None else found


def _array_pairs(path: Path) -> list[tuple[str, str]]:
    """Return the names of inputs and targets in an .npz file with both sets, such as x_train and y_train."""
    if path.suffix.lower() != ".npz" or not path.is_file():
        return []
    try:
        names = set(names_in(path))
    except (OSError, BadZipFile):
        return []  # the reader says what is wrong
    for x, y in PAIRS:
        for part in HELD_OUT:
            wanted = [(f"{x}_train", f"{y}_train"), (f"{x}_{part}", f"{y}_{part}")]
            if {name for pair in wanted for name in pair} <= names:
                return wanted
    return []


def _part(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the file or sub-folder of a folder that holds this set: train/, train.csv or x_train.npy."""
    spellings = [f"{start}{name}{end}" for name in names for start, end in _ends()]
    return next((folder / name for name in spellings if (folder / name).exists()), None)


def _ends() -> list[tuple[str, str]]:
    tables = [("", end) for end in ("", *READERS) if end != ".npy"]
    return [*tables, *((f"{x}_", ".npy") for x, _ in PAIRS)]


def _numbered(place: Path, held: Sequence[Stored]) -> list[Stored]:
    """Number classes that are words, in the order of their names in the training set."""
    words = [each.y for each in held if not isinstance(each.y, Tensor)]
    if not words:
        return list(held)
    if len(words) < len(held):
        raise DataError(f"{place}: the classes are words in one of the two sets only; give both the same")
    classes = {word: k for k, word in enumerate(sorted(set(words[0])))}
    unknown = sorted({word for some in words for word in some} - classes.keys())
    if unknown:
        raise DataError(f"{place}: the test set has the class {unknown[0]!r}, which the training set has not")
    log.info("%s: the classes are %s", place, ", ".join(f"{k} {word}" for word, k in classes.items()))
    return [
        each._replace(y=torch.tensor([classes[word] for word in some])) for each, some in zip(held, words, strict=True)
    ]


def _alike(own: OwnData, train: Arrays, test: Arrays) -> tuple[Arrays, Arrays]:
    """Give both sets the same classes and groups; refuse samples of different shapes."""
    shapes = [_shapes(data.x) for data in (train, test)]
    if shapes[0] != shapes[1]:
        raise DataError(f"{own}: inputs have the shape {shapes[0]} to train and {shapes[1]} to test; make them alike")
    if (train.num_classes is None) != (test.num_classes is None):
        raise DataError(f"{own}: one of the two sets has classes and the other has not; say which with task")
    if train.num_classes is not None and test.num_classes is not None:
        most = max(train.num_classes, test.num_classes)
        train, test = (replace(data, num_classes=most) for data in (train, test))
    names = tuple(sorted({*train.group_names, *test.group_names}))
    return _with_groups(train, names), _with_groups(test, names)


def _with_groups(data: Arrays, names: tuple[str, ...]) -> Arrays:
    if data.groups is None:
        return data
    numbers = torch.tensor([names.index(name) for name in data.group_names])
    return replace(data, groups=numbers[data.groups], group_names=names)


def _shapes(x: Inputs) -> Any:
    return {k: tuple(v.shape[1:]) for k, v in x.items()} if isinstance(x, dict) else tuple(x.shape[1:])


def _standardised(train: Arrays, test: Arrays) -> tuple[Arrays, Arrays]:
    """Standardise float inputs by the training set, for each feature or channel."""

    def changed(x: Tensor, by: Tensor) -> Tensor:
        if not by.is_floating_point() or by.dim() < 2:
            return x
        others = [d for d in range(by.dim()) if d != 1]
        std, mean = torch.std_mean(by.double(), dim=others, correction=0, keepdim=True)
        return ((x.double() - mean) / torch.where(std > 0, std, 1.0)).to(x.dtype)

    def both(data: Arrays) -> Arrays:
        if isinstance(data.x, dict) and isinstance(train.x, dict):
            return replace(data, x={name: changed(x, train.x[name]) for name, x in data.x.items()})
        return replace(data, x=changed(data.x, train.x))  # type: ignore[arg-type]

    return both(train), both(test)


def _say_task(own: OwnData, train: Arrays) -> None:
    if own.task == "auto" and train.num_classes is not None and train.num_classes > 2:
        log.info(
            '%s: the targets are whole numbers, so there are %d classes; task = "regression" makes them numbers',
            own,
            train.num_classes,
        )
    if own.task == "auto" and train.num_classes is None and bool((train.y == train.y.round()).all()):
        log.info('%s: the targets are floats, so this is a regression; task = "classes" makes them classes', own)
