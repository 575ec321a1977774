"""The data of one device: a file or a folder on it that never leaves it."""

import csv
import io
import logging
import zipfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cutlayer.core.checks import reason
from cutlayer.data.arrays import Arrays, from_arrays
from cutlayer.data.files import bad_file, read_bytes, read_npz, reading
from cutlayer.data.pictures import entries_of, read_class_folders
from cutlayer.data.sample import Sample, check_labels, finite
from cutlayer.errors import DataError

log = logging.getLogger("cutlayer")

LABELS = ("label", "y", "target")  # names of the label column in a table; the first that is present
PAIRS = (("x", "y"), ("images", "labels"), ("data", "targets"))  # the first that is present
EXPECTED = (
    "an .npz, .safetensors, .csv or .tsv file, a folder with one of them, or one with a folder of pictures a class"
)
# zipfile raises a RuntimeError if it cannot decompress, and so does torch.
UNREADABLE = (OSError, RuntimeError, zipfile.BadZipFile, SafetensorError)

Pair = tuple[Tensor, Tensor]  # inputs and targets as they are stored


def local(path: Path, *, sample: Sample | None = None) -> Arrays:
    """Return the samples in a file or a folder of this device, checked against the [sample] of the run.

    uint8 inputs become floats in [0, 1], unless the run's inputs are integers. Without a sample, floats become float32
    and the classes are 0 to the largest label.
    """
    found = Path(path)
    try:
        found = _found(found)
        x, y = read_class_folders(found, sample) if found.is_dir() else READERS[found.suffix.lower()](found, sample)
    except UNREADABLE as error:
        raise bad_file(found, reason(error)) from error
    try:
        return _arrays(x, y, sample)
    except DataError as error:
        raise DataError(f"{found}: {error}") from error


def _arrays(x: Tensor, y: Tensor, sample: Sample | None) -> Arrays:
    for name, value in (("x", x), ("y", y)):
        if value.is_complex():
            raise DataError(f"{name} has the type {value.dtype}; give real numbers")
    if sample is not None and sample.classes is not None:
        check_labels(y, sample.classes)
    arrays = from_arrays(_inputs(x, sample), y)
    return finite(arrays.cast(torch.float32)) if sample is None else sample.standardised(sample.checked(arrays))


def _inputs(x: Tensor, sample: Sample | None) -> Tensor:
    """Convert integers to int64, except bytes, which are pixels unless the run's inputs are integers."""
    is_pixels = x.dtype == torch.uint8 and (sample is None or sample.is_float)
    return x if x.is_floating_point() or is_pixels else x.long()


def _found(path: Path) -> Path:
    """Return the data file at a path, or the folder of class folders."""
    if not path.exists():
        raise DataError(f"there is no file or folder {path}; give {EXPECTED}")
    if not path.is_dir():
        if path.suffix.lower() not in READERS:
            raise DataError(f"{path} is of a form that is not read here; give {EXPECTED}")
        return path
    entries = entries_of(path)
    files = [entry for entry in entries if entry.is_file() and entry.suffix.lower() in READERS]
    folders = [entry for entry in entries if entry.is_dir()]
    if len(files) + bool(folders) > 1:
        names = ", ".join([file.name for file in files] + [f"{folder.name}/" for folder in folders[:1]])
        raise DataError(f"{path} holds more than one set of data ({names}); give the path of one of them")
    if not files and not folders:
        raise DataError(f"{path} holds no data; give {EXPECTED}")
    return path if folders else files[0]


def _read_npz(path: Path, _: Sample | None) -> Pair:
    with zipfile.ZipFile(path) as file:
        present = [name.removesuffix(".npy") for name in file.namelist()]
    names = _pair(path, "arrays", present)
    x, y = (_tensor(path, name, array) for name, array in zip(names, read_npz(path, names), strict=True))
    return x, y


def _tensor(path: Path, name: str, array: NDArray[Any]) -> Tensor:
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise DataError(f"{path}: {name} has the type {array.dtype}; give numbers") from None


def _read_safetensors(path: Path, _: Sample | None) -> Pair:
    with safe_open(path, framework="pt") as file:
        x, y = (file.get_tensor(name) for name in _pair(path, "tensors", file.keys()))
    return x, y


def _pair(path: Path, what: str, present: Sequence[str]) -> tuple[str, str]:
    """Return the names of the inputs and the targets."""
    for pair in PAIRS:
        if set(pair) <= set(present):
            return pair
    found = f"the {what} {', '.join(sorted(present))}" if present else f"no {what}"
    raise DataError(f"{path} has {found}; name the inputs x and the targets y (or images, labels; data, targets)")


def _read_columns(path: Path, sample: Sample | None) -> tuple[Tensor, Tensor]:
    """Read a table of numbers: a header, then a line a sample, with one column for the label.

    Return all columns but the label as floats, and the labels: integers if the run has classes or all are whole.
    """
    numbers, whole = array("d"), True
    with reading(path, UnicodeDecodeError, csv.Error):
        text = io.StringIO(read_bytes(path).decode("utf-8-sig"), newline="")
        lines = csv.reader(text, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        header = _header(path, next(lines, []))
        at = _label_column(path, header)
        for cells in lines:
            if cells:
                where = f"line {lines.line_num} of {path}"
                numbers.extend(_row(where, cells, header, at))
                whole = whole and _is_whole(where, cells[at], sample)
    values = np.frombuffer(numbers, dtype=np.float64).reshape(-1, len(header))
    y = values[:, at].astype(np.int64 if whole and (sample is None or sample.classes) else np.float64)
    return torch.from_numpy(np.delete(values, at, axis=1)), torch.from_numpy(y)


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not names:
        raise DataError(f"{path} is empty; name the columns in its first line, and give a sample a line")
    if len(names) == 1:
        between = "tabs" if path.suffix.lower() == ".tsv" else "commas"
        raise DataError(f"{path} has one column; give at least a feature and the label, with {between} between")
    if all(_number(name) is not None for name in names):
        raise DataError(f"{path} begins with numbers; name the columns in the first line")
    return names


def _label_column(path: Path, header: list[str]) -> int:
    lowered = [name.lower() for name in header]
    for name in LABELS:
        if lowered.count(name) > 1:
            raise DataError(f"{path} has more than one column {name!r}; keep the one with the labels")
        if name in lowered:
            return lowered.index(name)
    log.info("%s: no column is named label, y or target, so the last one, %s, is the label", path, header[-1])
    return len(header) - 1


def _row(where: str, cells: list[str], header: list[str], at: int) -> list[float]:
    if len(cells) != len(header):
        raise DataError(f"{where} has {len(cells)} cells, but the header has {len(header)}; give every column one")
    try:
        return [float(cell) for cell in cells]
    except ValueError:
        k = next(k for k, cell in enumerate(cells) if _number(cell) is None)
    if not cells[k].strip():
        raise DataError(f"{where} has nothing in the column {header[k]!r}; fill it in or remove the line")
    if k == at:
        raise DataError(f"{where} has the label {cells[k]!r}; number the classes from 0, the same on every device")
    raise DataError(f"{where} has {cells[k]!r} in the column {header[k]!r}; give a number, or remove the column")


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _is_whole(where: str, label: str, sample: Sample | None) -> bool:
    """Return whether a label is a whole number; refuse one that is not if the run has classes."""
    number = float(label)
    whole = number.is_integer() and abs(number) < 2**53  # beyond, floats skip whole numbers
    if sample is None:
        return whole and label.strip().removeprefix("-").isdecimal()
    if sample.classes and not whole:
        raise DataError(f"{where} has the label {label!r}, but there are {sample.classes} classes; give a whole number")
    return whole


def _refuse_parquet(path: Path, _: Sample | None) -> Pair:
    raise DataError(f"{path}: .parquet files are read for tasks of texts only; give {EXPECTED}")


READERS: dict[str, Callable[[Path, Sample | None], Pair]] = {
    ".npz": _read_npz,
    ".safetensors": _read_safetensors,
    ".csv": _read_columns,
    ".tsv": _read_columns,
    ".parquet": _refuse_parquet,
}
