"""CIFAR-10 and CIFAR-100 in their two published forms: the binary version and the Python version.

The Python version is a pickle, and a pickle may call any function that it names. This reader imports none: it answers
each name that a CIFAR batch uses with a harmless stand-in, and refuses any other name.
"""

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from cutlayer.data.files import Bytes, FileForm, Images, Sets, bad_file, files_of, read_bytes

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def _batches(folder_name: str, train: list[str], test: str, read_file: Callable[[Path], Images]) -> FileForm[Sets]:
    def read(folder: Path) -> Sets | None:
        paths = files_of(folder / folder_name, [[name] for name in (*train, test)])
        if paths is None:
            return None
        *batches, held_out = (read_file(path) for path in paths)
        return Sets(Images(*(np.concatenate(part) for part in zip(*batches, strict=True))), held_out)

    return FileForm(f"{folder_name}/", read)


def _read_binary(path: Path, *, label_bytes: int) -> Images:
    """Read records of label bytes and pixels; the last label byte is the class (in CIFAR-100 after a coarse one)."""
    data = np.frombuffer(read_bytes(path), np.uint8)
    record = label_bytes + PIXELS
    if not len(data) or len(data) % record:
        raise bad_file(path, f"it has {len(data)} bytes, not a positive multiple of {record}")
    rows = data.reshape(-1, record)
    return Images(rows[:, label_bytes:].reshape(-1, *SHAPE), rows[:, label_bytes - 1].astype(np.int64))


def _read_python(path: Path, *, label_key: str) -> Images:
    """Read a pickled dict of data and labels."""
    batch = _unpickled(path)
    labels = batch.get(label_key)
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise bad_file(path, f"it has no list of numbers under {label_key!r}")
    try:
        x, y = batch["data"].as_bytes(), np.array(labels, dtype=np.int64)
    except OverflowError as error:
        raise bad_file(path, "it has a label of more than 64 bits") from error
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise bad_file(path, "it has no array of unsigned bytes under 'data'") from error
    if x.shape != (len(labels), PIXELS):
        raise bad_file(path, f"it holds data of shape {x.shape} for {len(labels)} labels")
    return Images(x.reshape(-1, *SHAPE), y)


class _Type:
    """Stands in for numpy.dtype; keeps its name."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and flags, which mean nothing for single bytes."""


class _Array:
    """Stands in for a numpy array; keeps its shape, type and bytes."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def as_bytes(self) -> Bytes:
        _, shape, kind, column_major, data = self.state
        if kind.name != "u1":
            raise ValueError(kind.name)
        return np.frombuffer(data, np.uint8).reshape(shape, order="F" if column_major else "C")


def _encoded(text: str, _: str) -> bytes:
    """Stands in for codecs.encode: old protocols write bytes as text."""
    return text.encode("latin1")


class RestrictedUnpickler(pickle.Unpickler):
    """Rebuilds plain values and byte arrays; nothing that a file names is imported or called."""

    STAND_INS: ClassVar[dict[str, Any]] = {
        "numpy.core.multiarray._reconstruct": _Array,
        "numpy._core.multiarray._reconstruct": _Array,
        "numpy.ndarray": _Array,
        "numpy.dtype": _Type,
        "_codecs.encode": _encoded,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.STAND_INS[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR batch needs") from None


def _unpickled(path: Path) -> dict[Any, Any]:
    try:
        # "bytes" keeps the raw pixels of files that Python 2 wrote.
        batch = RestrictedUnpickler(io.BytesIO(read_bytes(path)), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise bad_file(path, error) from error
    except (EOFError, ValueError, TypeError, AttributeError, LookupError, ImportError, OverflowError) as error:
        raise bad_file(path, f"it is not a CIFAR batch ({error})") from error
    if not isinstance(batch, dict):
        raise bad_file(path, f"it holds a {type(batch).__name__}, not a dict")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}


BATCHES = [f"data_batch_{i}" for i in range(1, 6)]
BINARIES = [f"{batch}.bin" for batch in BATCHES]
CIFAR10 = (
    _batches("cifar-10-batches-bin", BINARIES, "test_batch.bin", partial(_read_binary, label_bytes=1)),
    _batches("cifar-10-batches-py", BATCHES, "test_batch", partial(_read_python, label_key="labels")),
)
CIFAR100 = (
    _batches("cifar-100-binary", ["train.bin"], "test.bin", partial(_read_binary, label_bytes=2)),
    _batches("cifar-100-python", ["train"], "test", partial(_read_python, label_key="fine_labels")),
)
