"""Shakespeare's roles as clients: a sample is 80 characters of what a role says, and the next character.

LEAF's files are used as they are. In a text, a role's speeches are joined in order, and a sample begins at every
STRIDE-th character. In LEAF one begins at every character: four times the memory for nearly the same windows.

If the files have no test set, the last fifth of each role's samples is test data. Test samples that share a character
with a training sample or its label are left out, and so is a role without a training or a test sample.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cutlayer.data.arrays import Arrays
from cutlayer.data.files import FileForm, bad_file, incomplete, read_bytes, read_parquet

Ints = NDArray[np.int64]

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80
WINDOW = 80
STRIDE = 4
TEST = 0.2


class Windows(NamedTuple):
    """Windows of one role, in order of time, and the character after each."""

    x: Ints  # (samples, 80)
    y: Ints  # (samples,)


Roles = Mapping[str, Windows]
Sets = tuple[Arrays, Arrays]


def encoded(text: str) -> Ints:
    """Return the index of each character in the alphabet; unknown characters count as a space."""
    table = np.full(129, ALPHABET.index(" "), dtype=np.int64)  # the last entry is for everything that is not ASCII
    table[[ord(c) for c in ALPHABET]] = np.arange(len(ALPHABET))
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int64)
    indices: Ints = table[codes.clip(max=128)]
    return indices


def windows(text: str, stride: int) -> Windows:
    """Return the samples of a text, one at every stride-th character."""
    codes = encoded(text)
    if len(codes) <= WINDOW:
        return Windows(np.empty((0, WINDOW), np.int64), np.empty(0, np.int64))
    return Windows(np.lib.stride_tricks.sliding_window_view(codes[:-1], WINDOW)[::stride], codes[WINDOW::stride])


def divided(path: Path, roles: Roles, stride: int) -> Sets:
    """Split each role's samples: the first four fifths to train and, after a gap, the last ones to test."""
    apart = WINDOW // stride + 1  # distance to the next sample that shares no character
    train, test = {}, {}
    for name, samples in roles.items():
        num_train = int((1 - TEST) * len(samples.y))
        first_test = num_train - 1 + apart
        if num_train and first_test < len(samples.y):
            train[name] = Windows(samples.x[:num_train], samples.y[:num_train])
            test[name] = Windows(samples.x[first_test:], samples.y[first_test:])
    if not train:
        raise bad_file(path, "no role in it says enough for a training and a test sample")
    return _arrays(train, sorted(train)), _arrays(test, sorted(train))


def _arrays(roles: Roles, names: list[str]) -> Arrays:
    held = [roles[name] for name in names if name in roles]
    sizes = [len(roles[name].y) if name in roles else 0 for name in names]
    return Arrays(
        x=torch.from_numpy(np.concatenate([samples.x for samples in held])),
        y=torch.from_numpy(np.concatenate([samples.y for samples in held])),
        num_classes=len(ALPHABET),
        groups=torch.from_numpy(np.repeat(np.arange(len(names)), sizes)),
        group_names=tuple(names),
    )


def _from_speeches(path: Path, speeches: Iterable[tuple[str, str]]) -> Sets:
    """Make samples of pairs (role, what it says), in the order of the play."""
    said: dict[str, list[str]] = {}
    for role, speech in speeches:
        said.setdefault(role, []).append(speech)
    texts = {role: re.sub(" +", " ", "\n".join(parts)) for role, parts in said.items()}
    return divided(path, {role: windows(text, STRIDE) for role, text in texts.items()}, STRIDE)


def _read_parquet(folder: Path) -> Sets | None:
    path = folder / "shakespeare_plays.parquet"
    if not path.is_file():
        return None
    rows = read_parquet(path, extra="parquet", name="shakespeare: ")
    try:
        speeches = [(f"{row['play']}/{row['speaker']}", row["text"]) for row in rows if row["text"]]
    except KeyError as error:
        raise bad_file(path, f"it has no column {error}") from error
    return _from_speeches(path, speeches)


def _read_script(folder: Path) -> Sets | None:
    path = folder / "tinyshakespeare.txt"
    return _from_speeches(path, _speeches(path)) if path.is_file() else None


def _speeches(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (speaker, speech) of each block; one without a line `Speaker:` belongs to the last speaker."""
    speaker = ""
    for block in re.split(r"\n\s*\n", read_bytes(path).decode("utf-8", errors="replace").strip()):
        head, _, rest = block.partition("\n")
        if head.endswith(":"):
            speaker, block = head[:-1], rest
        if not speaker:
            raise bad_file(path, "it does not begin with a line 'Speaker:'")
        if block:
            yield speaker, block


def _read_leaf(folder: Path) -> Sets | None:
    """Read train/*.json and test/*.json, or all_data/*.json, which is split here."""
    train, test, everything = (sorted((folder / name).glob("*.json")) for name in ("train", "test", "all_data"))
    if train and test:
        sets = [_leaf_roles(paths) for paths in (train, test)]
        names = sorted({name for roles in sets for name in roles})
        return _arrays(sets[0], names), _arrays(sets[1], names)
    if everything:
        return divided(everything[0], _leaf_roles(everything), stride=1)
    if train or test:
        raise incomplete(folder, "test/*.json" if train else "train/*.json")
    return None


def _leaf_roles(paths: list[Path]) -> dict[str, Windows]:
    roles = {}
    for path in paths:
        try:
            users: dict[str, Any] = json.loads(read_bytes(path))["user_data"]
            for name, data in users.items():
                x, y = encoded("".join(data["x"])), encoded("".join(data["y"]))
                roles[name] = Windows(x.reshape(len(data["x"]), WINDOW), y.reshape(len(data["x"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise bad_file(path, f"it is not a LEAF file of {WINDOW} characters and the next one ({error})") from error
    if not any(len(samples.y) for samples in roles.values()):
        raise bad_file(paths[0], "it holds no sample")
    return roles


FORMS = (
    FileForm("LEAF's train/*.json and test/*.json (or all_data/*.json)", _read_leaf),
    FileForm("shakespeare_plays.parquet", _read_parquet),
    FileForm("tinyshakespeare.txt", _read_script),
)
