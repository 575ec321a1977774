"""Writes the files of a folder of keys, and says what could not be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cutlayer.errors import ConfigError


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn OS errors into one that names the folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"keys could not be written to {folder}: {error.strerror or error}; mend that or choose another folder"
        ) from error


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can read, unless it is there."""
    for place in (*reversed(folder.parents), folder):
        if place != folder and place.is_dir():
            continue
        place.mkdir(mode=0o700, exist_ok=True)


def put(path: Path, data: bytes) -> None:
    """Write a file atomically, which its owner alone can read from the start."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    partial.replace(path)


def refuse_to_overwrite(path: Path) -> None:
    """Refuse to replace a key."""
    if path.exists():
        raise ConfigError(f"{path} is there already and is not overwritten; move it away, or choose another folder")
