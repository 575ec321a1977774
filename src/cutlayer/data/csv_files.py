"""Tables of numbers in .csv and .tsv files: a header, then a line a sample."""

import csv
import io
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cutlayer.data.columns import Columns, Stored, roles_of
from cutlayer.data.files import read_bytes, reading
from cutlayer.data.sample import Sample
from cutlayer.errors import DataError

NAMED = {",": "commas", "\t": "tabs", ";": "';'", "|": "'|'"}  # what may stand between the cells of a line


def read_csv(path: Path, sample: Sample | None, columns: Columns) -> Stored:
    """Return the features as floats, and the labels: integers if the run has classes or all are whole."""
    numbers, labels, groups = array("d"), list[str](), list[str]()
    text = io.StringIO(_text(path), newline="")
    with reading(path, csv.Error):
        lines = csv.reader(text, delimiter=_delimiter(path))
        header = _header(path, next(lines, []))
        roles = roles_of(path, header, columns)
        inputs, at = [header.index(name) for name in roles.features], header.index(roles.target)
        for cells in lines:
            if cells:
                where = f"line {lines.line_num} of {path}"
                _check_cells(where, cells, header, [*inputs, at])
                numbers.extend(_numbers(where, cells, header, inputs))
                labels.append(_label(where, cells[at], sample, columns).strip())
                if roles.group is not None:
                    groups.append(cells[header.index(roles.group)].strip())
    x = np.frombuffer(numbers, dtype=np.float64).reshape(-1, len(inputs))
    y = _targets(labels, sample)
    return Stored(torch.from_numpy(x), y, tuple(groups) if roles.group is not None else None)


def _text(path: Path) -> str:
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} is not in UTF-8: see line {line}; save it as UTF-8") from error


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not names:
        raise DataError(f"{path} is empty; name the columns in its first line, and give a sample a line")
    if len(names) == 1:
        between, other = NAMED[_delimiter(path)], next((mark for mark in NAMED if mark in names[0]), None)
        seems = "" if other is None else f"; it seems to be separated by {NAMED[other]}"
        raise DataError(f"{path} has one column{seems}; give at least a feature and the label, with {between} between")
    if all(_number(name) is not None for name in names):
        raise DataError(
            f"{path}: the first line seems to hold data, not names; put a line with the names of the columns above it"
        )
    return names


def _check_cells(where: str, cells: list[str], header: list[str], used: list[int]) -> None:
    if len(cells) != len(header):
        raise DataError(f"{where} has {len(cells)} cells, but the header has {len(header)}; give every column one")
    for k in used:
        if not cells[k].strip():
            raise DataError(f"{where} has nothing in the column {header[k]!r}; fill it in or remove the line")


def _numbers(where: str, cells: list[str], header: list[str], inputs: list[int]) -> list[float]:
    try:
        return [float(cells[k]) for k in inputs]
    except ValueError:
        k = next(k for k in inputs if _number(cells[k]) is None)
    raise DataError(
        f"{where} has {cells[k]!r} in the column {header[k]!r}; give each category a number, or list the numeric "
        "columns in features = [...]"
    )


def _label(where: str, label: str, sample: Sample | None, columns: Columns) -> str:
    """Return a label; refuse a word where classes need numbers, and a fraction where there are classes."""
    number = _number(label)
    if number is None:
        if columns.words:
            return label
        raise DataError(f"{where} has the label {label!r}; number the classes from 0, the same on every device")
    if sample is not None and sample.classes and not _is_whole(number):
        raise DataError(f"{where} has the label {label!r}, but there are {sample.classes} classes; give a whole number")
    return label


def _targets(labels: list[str], sample: Sample | None) -> Tensor | tuple[str, ...]:
    numbers = [_number(label) for label in labels]
    if any(number is None for number in numbers):
        return tuple(labels)
    values = np.array(numbers, dtype=np.float64)
    if sample is None:
        classes = all(map(_is_whole, values)) and all(label.removeprefix("-").isdecimal() for label in labels)
    else:
        classes = bool(sample.classes)
    return torch.from_numpy(values.astype(np.int64 if classes else np.float64))


def _is_whole(number: float) -> bool:
    return float(number).is_integer() and abs(number) < 2**53  # beyond, floats skip whole numbers


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
