"""Tables of numbers in .csv and .tsv files: a header, one sample a line, one column with the label."""

import csv
import io
import logging
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cutlayer.data.files import read_bytes, reading
from cutlayer.data.sample import Sample
from cutlayer.errors import DataError

log = logging.getLogger("cutlayer")

LABELS = ("label", "y", "target")  # the first that is present


def read_columns(path: Path, sample: Sample | None) -> tuple[Tensor, Tensor]:
    """Return all columns but the label as floats, and the labels: integers if the run has classes or all are whole."""
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
