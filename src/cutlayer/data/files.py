"""Reading and caching of files: the forms of data sets, the .npz and IDX formats of images, and parquet."""

import gzip
import logging
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cutlayer.errors import DataError

log = logging.getLogger("cutlayer")

Bytes = NDArray[np.uint8]
Read = TypeVar("Read")


class Images(NamedTuple):
    """Images (samples, channels, height, width) and their labels, as stored."""

    x: Bytes
    y: NDArray[np.int64]


class Sets(NamedTuple):
    """A training and a test set."""

    train: Images
    test: Images


class FileForm(NamedTuple, Generic[Read]):
    """One accepted form of a data set."""

    expected: str  # its file names, for the error message if none is found
    read: Callable[[Path], Read | None]  # from a folder; None if it has no files of this form


def bad_file(path: Path, reason: object) -> DataError:
    """Return the error for a file that exists but cannot be used."""
    return DataError(f"cannot read {path}: {reason}. Replace the file with a fresh copy.")


@contextmanager
def reading(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turn these errors, raised while a file is read, into one that names the file."""
    try:
        yield
    except errors as error:
        raise bad_file(path, error) from error


def incomplete(folder: Path, missing: str) -> DataError:
    """Return the error for a folder that lacks some of its files."""
    return DataError(f"{folder} is incomplete: {missing} is missing. Add it, or remove the others.")


def files_of(folder: Path, accepted: list[list[str]]) -> list[Path] | None:
    """Return the first existing file of each list of names; None if there are none, an error if some are missing."""
    found = [next((folder / name for name in names if (folder / name).is_file()), None) for names in accepted]
    if not any(found):
        return None
    missing = [names[0] for names, path in zip(accepted, found, strict=True) if path is None]
    if missing:
        raise incomplete(folder, ", ".join(missing))
    return [path for path in found if path is not None]


def npz(name: str, shape: tuple[int, int, int]) -> FileForm[Sets]:
    """Return the form <name>.npz with x_train, y_train, x_test, y_test: uint8 images, channels first or last."""

    def read(folder: Path) -> Sets | None:
        path = folder / f"{name}.npz"
        if not path.is_file():
            return None
        x_train, y_train, x_test, y_test = read_npz(path, ("x_train", "y_train", "x_test", "y_test"))
        return Sets(_npz_images(path, x_train, y_train, shape), _npz_images(path, x_test, y_test, shape))

    return FileForm(f"{name}.npz", read)


def read_npz(path: Path, keys: Sequence[str]) -> list[NDArray[Any]]:
    """Return the arrays of these names in an .npz file."""
    with (
        reading(path, OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error),
        np.load(path, allow_pickle=False) as file,
    ):
        return [file[key] for key in keys]


def _npz_images(path: Path, x: NDArray[np.generic], y: NDArray[np.generic], shape: tuple[int, int, int]) -> Images:
    channels, height, width = shape
    if x.shape[1:] == (height, width, channels):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype != np.uint8 or x.shape[1:] not in (shape, shape[1:] if channels == 1 else shape):
        raise bad_file(path, f"it holds {x.dtype} images of shape {x.shape[1:]}, expected uint8 and {shape}")
    if y.dtype.kind not in "iu" or y.size != len(x):
        raise bad_file(path, f"it holds {y.size} labels of type {y.dtype} for {len(x)} images")
    return Images(x.reshape(-1, *shape).astype(np.uint8), y.reshape(-1).astype(np.int64))


def idx(shape: tuple[int, int, int]) -> FileForm[Sets]:
    """Return the form of MNIST's four IDX files, plain or gzipped, with a dash or a dot before idx."""

    def read(folder: Path) -> Sets | None:
        stems = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
        paths = files_of(folder, [_spellings(stem) for stem in stems])
        if paths is None:
            return None
        x_train, y_train, x_test, y_test = paths
        return Sets(_idx_images(x_train, y_train, shape), _idx_images(x_test, y_test, shape))

    return FileForm("train-images-idx3-ubyte and its three companions (or .gz)", read)


def _idx_images(images: Path, labels: Path, shape: tuple[int, int, int]) -> Images:
    x, y = read_idx(images), read_idx(labels)
    if x.shape[1:] != shape[1:]:
        raise bad_file(images, f"it holds images of shape {x.shape[1:]}, expected {shape[1:]}")
    if y.shape != (len(x),):
        raise bad_file(labels, f"it holds labels of shape {y.shape} for {len(x)} images")
    return Images(x.reshape(-1, *shape), y.astype(np.int64))


def _spellings(stem: str) -> list[str]:
    """Return the names of a file, such as train-images-idx3-ubyte, train-images.idx3-ubyte, and both gzipped."""
    dotted = stem.replace("-idx", ".idx")
    return [f"{name}-ubyte{end}" for end in ("", ".gz") for name in (stem, dotted)]


def read_idx(path: Path) -> Bytes:
    """Return the array in an IDX file of unsigned bytes."""
    data = read_bytes(path)
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise bad_file(path, "it is not an IDX file of unsigned bytes")
    header = 4 + 4 * data[3]
    if len(data) < header:
        raise bad_file(path, "its header is cut off")
    shape = struct.unpack(f">{data[3]}I", data[4:header])
    if len(data) - header != int(np.prod(shape, dtype=object)):
        raise bad_file(path, f"its header says shape {shape}, but {len(data) - header} bytes follow")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def read_parquet(path: Path, *, extra: str, name: str = "") -> list[dict[str, Any]]:
    """Return the rows of a parquet file; `extra` is the extra of cutlayer that installs pyarrow."""
    arrow = pyarrow_for(path, extra, name)
    with reading(path, OSError, arrow.ArrowException):
        rows: list[dict[str, Any]] = arrow.parquet.read_table(path).to_pylist()
    return rows


def pyarrow_for(path: Path, extra: str, name: str = "") -> Any:
    """Import pyarrow, which reads this file or folder."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{name}{path} cannot be read without pyarrow; install it with: pip install 'cutlayer[{extra}]'"
        ) from None
    return pyarrow


def read_bytes(path: Path) -> bytes:
    """Return a file's content, decompressed if its name ends in .gz."""
    with reading(path, OSError, EOFError, zlib.error):
        data = path.read_bytes()
        return gzip.decompress(data) if path.suffix == ".gz" else data


def keep(name: str, what: str, path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz file atomically; if the folder cannot be written, only log it."""
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


def made_once(name: str, what: str, path: Path, mark: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
    """Return the array that is cached in an .npz file with this mark, or make it and cache it."""
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
