"""Checkpoints: one safetensors file a round, committed by a rename, checked by a digest, read without running code.

The tensors lie in the file under their paths in the tree, such as `/client/params/conv.weight`; the header holds the
rest of the tree (the skeleton) and a manifest, both as JSON.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from cutlayer.errors import CheckpointError
from cutlayer.state import Grads, Model, Part, Progress, State, Tensors
from cutlayer.tree import Tree

log = logging.getLogger("cutlayer")

AnyClass = TypeVar("AnyClass", bound=type)
Skeleton = Any

_CLASSES: dict[str, Any] = {}
_PARTIAL = ".partial"


def register(cls: AnyClass) -> AnyClass:
    """Let checkpoints hold values of this class, which has `_fields` and `_make` as a NamedTuple has."""
    known = _CLASSES.setdefault(cls.__name__, cls)
    if known is not cls:
        raise CheckpointError(f"two classes named {cls.__name__!r} cannot both be stored; rename one of them.")
    return cls


for _cls in (Model, Progress, Part, Grads, State):
    register(_cls)


def known_class(name: str) -> Any:
    """The class that is registered under this name."""
    if name not in _CLASSES:
        raise CheckpointError(f"it holds a {name}, which this version of cutlayer does not know")
    return _CLASSES[name]


def pack(tree: Tree) -> tuple[Tensors, Skeleton]:
    """The tensors of a tree by their paths, and the rest of it as JSON values."""
    tensors: Tensors = {}
    return tensors, _strip(tree, "", tensors)


def unpack(tensors: Tensors, skeleton: Skeleton) -> Tree:
    """The tree that `pack` took apart."""
    if not isinstance(skeleton, dict):
        return skeleton
    ((kind, content),) = skeleton.items()
    return _BUILDERS[kind](tensors, content) if kind in _BUILDERS else _build_named(tensors, kind, content)


def _strip(value: Tree, path: str, tensors: Tensors) -> Skeleton:
    """The skeleton of a value; its tensors are added to `tensors`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}  # exact, and JSON has no infinities
    if isinstance(value, Tensor) and value.is_meta:  # of the other server: only its shape is known here
        return {"shape": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if isinstance(value, Tensor):
        # A copy of its own: safetensors refuses tensors that share memory, and a view may be expanded.
        tensors[path] = (
            value.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)
        )
        return {"tensor": path}
    if type(value) is dict:
        return {"dict": {key: _strip(item, _below(path, key), tensors) for key, item in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_strip(item, _below(path, str(i)), tensors) for i, item in enumerate(value)]}
    if _CLASSES.get(type(value).__name__) is type(value):
        fields = {name: _strip(getattr(value, name), _below(path, name), tensors) for name in value._fields}
        return {type(value).__name__: fields}
    raise CheckpointError(
        f"a checkpoint cannot hold the {type(value).__name__} at {path or '/'}; "
        "use tensors, plain numbers, strings, lists, tuples, dicts or a registered class."
    )


def _below(path: str, key: Any) -> str:
    """The path of a child, escaped as in a JSON pointer so that no two paths are alike."""
    if type(key) is not str:
        raise CheckpointError(f"a checkpoint cannot hold the key {key!r} at {path or '/'}; use strings as keys.")
    return f"{path}/{key.replace('~', '~0').replace('/', '~1')}"


def _build_named(tensors: Tensors, name: str, fields: dict[str, Skeleton]) -> Any:
    cls = _CLASSES.get(name)
    if cls is None or tuple(fields) != tuple(cls._fields):
        raise CheckpointError(f"it holds a {name}({', '.join(fields)}), which this version of cutlayer does not know")
    return cls._make(unpack(tensors, item) for item in fields.values())


_BUILDERS: dict[str, Callable[[Tensors, Any], Any]] = {
    "float": lambda tensors, text: float.fromhex(text),
    "tensor": lambda tensors, path: tensors[path],
    "shape": lambda tensors, form: torch.empty(form[1], dtype=getattr(torch, form[0]), device="meta"),
    "dict": lambda tensors, items: {key: unpack(tensors, item) for key, item in items.items()},
    "list": lambda tensors, items: [unpack(tensors, item) for item in items],
    "tuple": lambda tensors, items: tuple(unpack(tensors, item) for item in items),
}


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run in one folder."""

    folder: Path
    keep: int = 2  # how many of the newest checkpoints stay

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise CheckpointError(f"keep is {self.keep}, but a store must keep at least 1 checkpoint.")

    def path(self, round: int) -> Path:
        """Where the checkpoint of a round lies."""
        return self.folder / f"round-{round:06d}.safetensors"

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, oldest first."""
        found = (re.fullmatch(r"round-(\d{6,})\.safetensors", path.name) for path in self.folder.glob("round-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, round: int, content: Tree, manifest: dict[str, Any]) -> None:
        """Commit a checkpoint; earlier ones beyond `keep` go, and so do later ones, which a run that went back left."""
        data = _encode(content, manifest)
        partial = self.path(round).with_name(self.path(round).name + _PARTIAL)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_partials()
            _write(partial, data)
            partial.replace(self.path(round))
            _sync_folder(self.folder)
        except OSError as error:
            self._remove_partials()
            earlier = self.rounds()
            state = f"{self.path(earlier[-1]).name} is still good" if earlier else "there is no earlier checkpoint"
            raise CheckpointError(
                f"the checkpoint of round {round} could not be written to {self.folder}: {error.strerror or error}; "
                f"{state}. Make room there or choose another folder, then resume the run."
            ) from error
        self._prune(round)

    def load(self, round: int | None = None) -> tuple[Tree, dict[str, Any]]:
        """Content and manifest of a round, or of the newest checkpoint that is sound."""
        if round is not None:
            return self._load_exactly(round)
        reasons = []
        for newest in reversed(self.rounds()):
            try:
                found = _read(self.path(newest))
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                log.warning("%s; resuming from round %d instead", reason, newest)
            return found
        raise CheckpointError(
            f"no usable checkpoint in {self.folder}: {'; '.join(reasons) or 'it has none'}. "
            "Restore one from a backup, or start the run anew in another folder."
        )

    def _load_exactly(self, round: int) -> tuple[Tree, dict[str, Any]]:
        known = self.rounds()
        if round not in known:
            there = f"it has those of rounds {', '.join(map(str, known))}" if known else "it has none"
            raise CheckpointError(f"there is no checkpoint of round {round} in {self.folder}; {there}.")
        try:
            return _read(self.path(round))
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Restore it from a backup, or resume from another round.") from error

    def _prune(self, newest: int) -> None:
        kept = [round for round in self.rounds() if round <= newest][-self.keep :]
        for round in set(self.rounds()) - set(kept):
            with suppress(OSError):  # the commit stands; the next one tries again
                self.path(round).unlink()

    def _remove_partials(self) -> None:
        for leftover in self.folder.glob(f"round-*{_PARTIAL}"):
            with suppress(OSError):
                leftover.unlink()


def _encode(content: Tree, manifest: dict[str, Any]) -> bytes:
    """The bytes of a checkpoint file."""
    tensors, skeleton = pack(content)
    try:
        texts = {"skeleton": json.dumps(skeleton), "manifest": json.dumps(manifest)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of a checkpoint must be plain JSON values: {error}.") from error
    try:
        return to_bytes(tensors, {**texts, "digest": _digest(tensors, texts)})
    except KeyError as error:
        raise CheckpointError(f"a checkpoint cannot hold tensors of type {error}; convert them first.") from error


def _digest(tensors: Tensors, texts: dict[str, str]) -> str:
    """A hash over everything that a checkpoint holds."""
    digest = hashlib.blake2b(digest_size=16)
    for key in ("skeleton", "manifest"):
        digest.update(texts[key].encode() + b"\0")
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until a rename in this folder is on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows has no such wait
        return
    handle = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Content and manifest of one file, or a CheckpointError that names it and the reason."""
    try:
        with safe_open(path, "pt") as file:
            texts = file.metadata() or {}
            mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if _digest(mapped, texts) != texts["digest"]:
                raise CheckpointError("its content does not match its digest")
            tensors = {name: tensor.clone() for name, tensor in mapped.items()}  # they outlive the file
        return unpack(tensors, json.loads(texts["skeleton"])), json.loads(texts["manifest"])
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
