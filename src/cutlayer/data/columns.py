"""Which parts of a file are the inputs, the targets and the groups of its samples, and what was read from them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor

from cutlayer.data.arrays import Inputs
from cutlayer.errors import DataError, UnknownNameError

log = logging.getLogger("cutlayer")

Task = Literal["auto", "classes", "regression"]  # auto: classes if all targets are integers
LABELS = ("label", "labels", "y", "target")  # names of the column with the targets; the first that is present


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a table, or arrays of a file, that a user names; the usual names by default."""

    target: str | None = None
    features: tuple[str, ...] = ()  # by default all but the target and the group
    group: str | None = None
    task: Task = "auto"
    words: bool = False  # whether classes may have names; devices could number them differently


class Stored(NamedTuple):
    """Samples as a file holds them; targets that are words are the names of classes."""

    x: Inputs
    y: Tensor | tuple[str, ...]
    groups: tuple[str, ...] | None = None


class Roles(NamedTuple):
    """The names of the inputs, the target and the group in a file."""

    features: tuple[str, ...]
    target: str
    group: str | None


def roles_of(path: Path, names: Sequence[str], columns: Columns) -> Roles:
    """Return which columns of a table have which role."""
    target = _target(path, names, columns.target)
    group = None if columns.group is None else found(path, names, columns.group)
    features = tuple(found(path, names, name) for name in columns.features)
    features = features or tuple(name for name in names if name not in (target, group))
    if not features:
        raise DataError(f"{path} has no column besides the target and the group; give at least one feature")
    if target in features:
        raise DataError(f"{path}: {target!r} is the target, so it cannot be a feature as well; name another target")
    for name in (*features, target, *([] if group is None else [group])):
        if names.count(name) > 1:
            raise DataError(f"{path} has more than one column {name!r}; give each column a name of its own")
    return Roles(features, target, group)


def found(path: Path, names: Sequence[str], name: str) -> str:
    """Return the name of a column that there is."""
    if name not in names:
        raise UnknownNameError("column", name, names, str(path))
    return name


def _target(path: Path, names: Sequence[str], asked: str | None) -> str:
    if asked is not None:
        return found(path, names, asked)
    lowered = [name.lower() for name in names]
    for label in LABELS:
        if lowered.count(label) > 1:
            raise DataError(f"{path} has more than one column {label!r}; keep the one with the labels")
        if label in lowered:
            return names[lowered.index(label)]
    log.info("%s: no column is named label, y or target, so the last one, %s, is the label", path, names[-1])
    return names[-1]
