"""The samples in a file or a folder of one's own: of a run, or of one device, which they never leave."""

import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.checks import reason
from cutlayer.data.arrays import Arrays, Inputs, from_arrays
from cutlayer.data.arrow import STATE, read_parquet_columns, read_saved
from cutlayer.data.columns import Columns, Stored, found
from cutlayer.data.csv_files import read_csv
from cutlayer.data.files import bad_file, read_npz
from cutlayer.data.pictures import entries_of, read_class_folders
from cutlayer.data.sample import Sample, check_labels, finite
from cutlayer.errors import DataError

PAIRS = (("x", "y"), ("images", "labels"), ("data", "targets"))  # inputs and targets; the first that is present
EXPECTED = (
    "an .npz, .npy, .safetensors, .csv, .tsv or .parquet file, a folder with one of them, one that datasets saved, or "
    "a folder with one sub-folder of images for each class"
)
# zipfile raises a RuntimeError if it cannot decompress, and so does torch.
UNREADABLE = (OSError, RuntimeError, zipfile.BadZipFile, SafetensorError)


def local(path: Path, *, sample: Sample | None = None, columns: Columns = Columns()) -> Arrays:
    """Return the samples in a file or a folder of this device, checked against the [sample] of the run.

    uint8 inputs become floats in [0, 1], unless the run's inputs are integers. Without a sample, floats become float32
    and the classes are 0 to the largest label.
    """
    place, held = stored(path, sample, columns)
    return as_arrays(place, held, columns, sample)


def stored(path: Path, sample: Sample | None = None, columns: Columns = Columns()) -> tuple[Path, Stored]:
    """Return the file or folder that was found at a path, and its samples as they are stored."""
    place = Path(path)
    try:
        place = _found(place)
        return place, _reader(place)(place, sample, columns)
    except UNREADABLE as error:
        raise bad_file(place, reason(error)) from error


def check_readable(path: Path) -> None:
    """Refuse a file or folder that cannot be read, whichever of its columns a run uses."""
    try:
        stored(path)
    except DataError as error:
        if error.__cause__ is not None:
            raise
        _found(path)  # raises an error if that was it; all others depend on the run


def as_arrays(place: Path, held: Stored, columns: Columns, sample: Sample | None = None) -> Arrays:
    """Convert and check stored samples, whose classes must be numbers by now."""
    try:
        return _arrays(held, columns, sample)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _arrays(held: Stored, columns: Columns, sample: Sample | None) -> Arrays:
    assert isinstance(held.y, Tensor)
    y = _targets(held.y, columns)
    for name, value in (("x", held.x), ("y", y)):
        for each in tree.tensors(value):
            if each.is_complex():
                raise DataError(f"{name} has the type {each.dtype}; give real numbers")
    if sample is not None and sample.classes is not None:
        check_labels(y, sample.classes)
    arrays = from_arrays(_inputs(held.x, sample), y, groups=held.groups)
    return finite(arrays.cast(torch.float32)) if sample is None else sample.standardised(sample.checked(arrays))


def _targets(y: Tensor, columns: Columns) -> Tensor:
    """Return the targets as the task needs them: whole numbers as classes, or floats."""
    if columns.task == "regression":
        return y if y.is_floating_point() else y.double()
    if columns.task == "classes" and y.is_floating_point():
        wrong = (y != y.round()).nonzero()
        if len(wrong):
            raise DataError(f"target {float(y[tuple(wrong[0])])} is no class; give whole numbers, or task 'regression'")
        return y.long()
    return y


def _inputs(x: Inputs, sample: Sample | None) -> Inputs:
    """Convert integers to int64, except bytes, which are pixels unless the run's inputs are integers."""

    def converted(a: Tensor) -> Tensor:
        is_pixels = a.dtype == torch.uint8 and (sample is None or sample.is_float)
        return a if a.is_floating_point() or is_pixels else a.long()

    inputs: Inputs = tree.map(converted, x)
    return inputs


def _found(path: Path) -> Path:
    """Return the data file at a path, or the folder of class folders or of a saved data set."""
    if not path.exists():
        raise DataError(f"there is no file or folder {path}; give {EXPECTED}")
    if not path.is_dir():
        if path.suffix.lower() not in READERS:
            raise DataError(f"{path} is of a form that is not read here; give {EXPECTED}")
        return path
    if (path / STATE).is_file():
        return path
    entries = entries_of(path)
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in READERS]
    files = [file for file in files if not _is_target(file, files)]
    folders = [entry for entry in entries if entry.is_dir()]
    if len(files) + bool(folders) > 1:
        names = ", ".join([file.name for file in files] + [f"{folder.name}/" for folder in folders[:1]])
        raise DataError(f"{path} holds more than one set of data ({names}); give the path of one of them")
    if not files and not folders:
        raise DataError(f"{path} holds no data; give {EXPECTED}")
    return path if folders else files[0]


def _reader(place: Path) -> "Reads":
    if place.is_dir():
        return read_saved if (place / STATE).is_file() else read_class_folders
    return READERS[place.suffix.lower()]


def _read_npz(path: Path, _: Sample | None, columns: Columns) -> Stored:
    names = names_in(path)
    features, target, group = _roles(path, "arrays", names, columns)
    wanted = [*features, target, *([] if group is None else [group])]
    held = dict(zip(wanted, read_npz(path, wanted), strict=True))
    tensors = {name: _tensor(path, name, held[name]) for name in (*features, target)}
    groups = None if group is None else tuple(str(value) for value in held[group].tolist())
    return Stored(_joined(tensors, features), tensors[target], groups)


def names_in(path: Path) -> list[str]:
    """Return the names of the arrays in an .npz file."""
    with zipfile.ZipFile(path) as file:
        return [name.removesuffix(".npy") for name in file.namelist()]


def _tensor(path: Path, name: str, array: NDArray[Any]) -> Tensor:
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise DataError(f"{path}: {name} has the type {array.dtype}; give numbers") from None


def _read_npy(path: Path, _: Sample | None, columns: Columns) -> Stored:
    """Read the inputs, and the targets from the file beside it."""
    if columns.target is not None and Path(columns.target).name != columns.target:
        raise DataError(f"the target of {path} is {columns.target!r}; give the name of a file in the same folder")
    beside = _beside(path) if columns.target is None else path.with_name(columns.target)
    if beside is None or not beside.is_file():
        wanted = path.with_name("y.npy") if beside is None else beside
        raise DataError(f"{path} has inputs only, and {wanted} is missing; put the targets there, or name their file")
    x, y = (_tensor(file, file.name, _load_npy(file)) for file in (path, beside))
    return Stored(x, y)


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        with path.open("rb") as stream:
            array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise bad_file(path, reason(error)) from error
    return array


def _beside(path: Path) -> Path | None:
    """Return the targets' file that belongs to a file of inputs: y.npy to x.npy, labels_test.npy to images_test.npy."""
    word, sign, rest = path.stem.partition("_")
    target = dict(PAIRS).get(word)
    return None if target is None else path.with_name(f"{target}{sign}{rest}{path.suffix}")


def _is_target(file: Path, files: Sequence[Path]) -> bool:
    return file.suffix.lower() == ".npy" and any(_beside(other) == file for other in files)


def _read_safetensors(path: Path, _: Sample | None, columns: Columns) -> Stored:
    with safe_open(path, framework="pt") as file:
        features, target, group = _roles(path, "tensors", list(file.keys()), columns)
        held = {name: file.get_tensor(name) for name in (*features, target, *([] if group is None else [group]))}
    groups = None if group is None else tuple(str(value) for value in held[group].tolist())
    return Stored(_joined(held, features), held[target], groups)


def _joined(tensors: dict[str, Tensor], features: Sequence[str]) -> Inputs:
    return tensors[features[0]] if len(features) == 1 else {name: tensors[name] for name in features}


def _roles(path: Path, what: str, names: Sequence[str], columns: Columns) -> tuple[Sequence[str], str, str | None]:
    """Return the names of the inputs, the targets and the groups."""
    pair = next((pair for pair in PAIRS if set(pair) <= set(names)), None)
    target = columns.target or (pair and pair[1])
    if target is None:
        held = f"the {what} {', '.join(sorted(names))}" if names else f"no {what}"
        raise DataError(f"{path} has {held}; name the inputs x and the targets y (or images, labels; data, targets)")
    for name in (target, *columns.features, *([] if columns.group is None else [columns.group])):
        found(path, names, name)
    others = [name for name in names if name not in (target, columns.group)]
    features = columns.features or ([pair[0]] if pair is not None and pair[0] != target else others)
    if not features:
        raise DataError(f"{path} has nothing besides the targets {target}; give it the inputs as well")
    return features, target, columns.group


Reads = Callable[[Path, Sample | None, Columns], Stored]
READERS: dict[str, Reads] = {
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet_columns,
}
