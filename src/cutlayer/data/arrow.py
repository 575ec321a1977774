"""Tables in arrow's formats: .parquet files, and folders that `save_to_disk` of the package datasets wrote."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cutlayer.data.columns import Columns, Stored, found, roles_of
from cutlayer.data.files import bad_file, pyarrow_for, reading
from cutlayer.data.pictures import Encoded, decode_alike
from cutlayer.data.sample import Sample
from cutlayer.errors import DataError

STATE = "state.json"  # marks a folder that `save_to_disk` wrote; it lists the files of the rows
EXTRA = "parquet"


def read_parquet_columns(path: Path, _: Sample | None, columns: Columns) -> Stored:
    """Return the samples of a .parquet file, one a row."""
    arrow = pyarrow_for(path, EXTRA)
    with reading(path, OSError, arrow.ArrowException):
        table = arrow.parquet.read_table(path)
    return _stored(path, table, columns)


def read_saved(path: Path, _: Sample | None, columns: Columns) -> Stored:
    """Return the samples of a folder that `save_to_disk` wrote; columns that its format leaves out are left out."""
    arrow = pyarrow_for(path, EXTRA)
    state = path / STATE
    with reading(state, OSError, ValueError, KeyError, TypeError):
        known = json.loads(state.read_text(encoding="utf-8"))
        names = [str(entry["filename"]) for entry in known["_data_files"]]
        shown = known.get("_format_columns")
    if any(Path(name).name != name for name in names):
        raise bad_file(state, "it lists files of another folder")
    tables = []
    for file in (path / name for name in names):
        with reading(file, OSError, arrow.ArrowException), arrow.memory_map(str(file)) as stream:
            tables.append(arrow.ipc.open_stream(stream).read_all())
    if not tables:
        raise bad_file(state, "it lists no files")
    table = arrow.concat_tables(tables)
    wanted = {*columns.features, columns.target, columns.group}
    kept = [name for name in table.column_names if shown is None or name in shown or name in wanted]
    return _stored(path, table.select(kept), columns)


def _stored(path: Path, table: Any, columns: Columns) -> Stored:
    roles = roles_of(path, table.column_names, columns)
    values = {name: _array(path, name, table[name]) for name in roles.features}
    y = table[roles.target]
    targets = _words(path, roles.target, y) if _is_text(y.type) else _array(path, roles.target, y)
    if isinstance(targets, tuple) and not columns.words:
        raise DataError(
            f"{path} has words in the column {roles.target!r}; number the classes from 0, the same on every device"
        )
    groups = None
    if roles.group is not None:
        column = table[found(path, table.column_names, roles.group)]
        _refuse_gaps(path, roles.group, column)
        groups = tuple(str(value) for value in column.to_pylist())
    return Stored(_inputs(values), targets if isinstance(targets, tuple) else _tensor(targets), groups)


def _inputs(values: dict[str, NDArray[Any]]) -> Tensor | dict[str, Tensor]:
    """Return single numbers side by side as one input; a column of arrays alone, or all columns by name."""
    if all(value.ndim == 1 for value in values.values()):
        return torch.from_numpy(np.stack([value.astype(np.float64) for value in values.values()], axis=1))
    tensors = {name: _tensor(value) for name, value in values.items()}
    return tensors if len(tensors) > 1 else next(iter(tensors.values()))


def _array(path: Path, name: str, column: Any) -> NDArray[Any]:
    """Return a column of numbers, of lists of one length, or of pictures."""
    arrow = pyarrow_for(path, EXTRA)
    _refuse_gaps(path, name, column)
    column = column.combine_chunks()
    if _is_picture(arrow, column.type):
        return _pictures(path, name, column)
    shape: list[int] = [len(column)]
    while arrow.types.is_nested(column.type) and not arrow.types.is_struct(column.type):
        lengths = arrow.compute.unique(arrow.compute.list_value_length(column)).to_pylist()
        if len(lengths) > 1:
            raise DataError(
                f"{path}: the lists in the column {name!r} have from {min(lengths)} to {max(lengths)} entries; bring "
                "them to one length, for example with padding='max_length' of the tokenizer"
            )
        shape.append(lengths[0] if lengths else 0)
        column = column.flatten()
    if column.null_count or not _is_number(arrow, column.type):
        what = "gaps in its lists" if column.null_count else f"the type {column.type}"
        raise DataError(
            f"{path}: the column {name!r} has {what}; give numbers, or list the numeric columns in features = [...]"
        )
    return np.array(column.to_numpy(zero_copy_only=False)).reshape(shape)


def _pictures(path: Path, name: str, column: Any) -> NDArray[Any]:
    content = column.field("bytes").to_pylist()
    if None in content:
        raise DataError(f"{path}: the pictures of the column {name!r} are in other files; save them with it")
    pictures = [Encoded(Path(f"picture {i} of {path}"), each) for i, each in enumerate(content)]
    return decode_alike(str(path), pictures).numpy()


def _is_picture(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0)


def _words(path: Path, name: str, column: Any) -> tuple[str, ...]:
    _refuse_gaps(path, name, column)
    return tuple(column.to_pylist())


def _refuse_gaps(path: Path, name: str, column: Any) -> None:
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise DataError(f"{path} has nothing in the column {name!r} of row {row}; fill it in or remove the row")


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string", "string_view") or str(kind).startswith("dictionary<values=string")


def _is_number(arrow: Any, kind: Any) -> bool:
    types: Sequence[Any] = (arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean)
    return any(fits(kind) for fits in types)


def _tensor(value: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value))
