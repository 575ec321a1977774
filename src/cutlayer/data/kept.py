"""What takes long to read from many small files, kept beside them as one .npz file for the next time."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cutlayer.data.files import read_npz
from cutlayer.errors import DataError

log = logging.getLogger("cutlayer")

Array = NDArray[Any]


def keep(name: str, what: str, path: Path, arrays: Mapping[str, Array]) -> None:
    """Write an .npz file, whole or not at all; a folder that cannot be written is no error."""
    partial = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    try:
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    except OSError as error:
        log.info("%s: cannot keep %s (%s); they will be made again next time", name, what, error)
    finally:
        if partial.is_file():
            partial.unlink()


def made_once(name: str, what: str, path: Path, mark: str, make: Callable[[], Array]) -> Array:
    """An array from its .npz file if that bears this mark; otherwise made, and kept with the mark."""
    if path.is_file():
        try:
            x, found = read_npz(path, ("x", "mark"))
            if str(found) == mark:
                return x
            why = "it belongs to other files or settings"
        except DataError:
            why = "it cannot be read"
        log.info("%s: %s is made again: %s", name, path, why)
    x = make()
    keep(name, what, path, {"x": x, "mark": np.array(mark)})
    return x
