"""Checkpoints: one safetensors file a round, committed by a rename, checked by a digest, loaded without running code.

The file holds each tensor under its path in the tree, such as `/client/params/conv.weight`. The header holds the rest
of the tree (its structure and its plain leaves) and a manifest, both as JSON.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from cutlayer.core.skeleton import decode, encode
from cutlayer.core.state import Tensors
from cutlayer.core.tree import STORABLE, Structure, Tree, flatten, unflatten
from cutlayer.errors import CheckpointError

log = logging.getLogger("cutlayer")

FORMAT = "2"  # of the files; others are refused
KEEP = 2  # how many checkpoints a run keeps: the newest
HELD = (Tensor, bool, int, float, str, dict, list, tuple)

_PARTIAL = ".partial"


def pack(tree: Tree) -> tuple[Tensors, dict[str, Any]]:
    """Return the tensors of a tree by their paths, and the rest of it as JSON values."""
    structure, leaves = flatten(tree)
    found = list(zip(_paths(structure, ""), leaves, strict=True))
    # Copies: safetensors refuses tensors that share memory, and a view may be expanded.
    tensors = {
        path: leaf.detach().resolve_conj().resolve_neg().to("cpu").clone(memory_format=torch.contiguous_format)
        for path, leaf in found
        if isinstance(leaf, Tensor) and not leaf.is_meta
    }
    return tensors, {"structure": encode(structure), "leaves": [_stripped(path, leaf) for path, leaf in found]}


def unpack(tensors: Tensors, skeleton: Mapping[str, Any]) -> Tree:
    """Return the tree that `pack` took apart."""
    try:
        structure = decode(skeleton["structure"])
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return unflatten(structure, [_restored(tensors, leaf) for leaf in skeleton["leaves"]])


def _paths(structure: Structure, path: str) -> Iterator[str]:
    """Yield the path of each leaf; refuse what a checkpoint cannot hold."""
    kind = structure[0] if isinstance(structure, tuple) else structure
    if kind is not None and kind not in HELD and STORABLE.get(kind.__name__) is not kind:
        raise CheckpointError(
            f"a checkpoint cannot hold the {kind.__name__} at {path or '/'}; "
            "use tensors, plain numbers, strings, lists, tuples, dicts or a registered class."
        )
    if isinstance(structure, tuple):
        _, names, items = structure
        for name, item in zip(range(len(items)) if names is None else names, items, strict=True):
            yield from _paths(item, _below(path, name))
    elif kind is not None:
        yield path


def _below(path: str, key: Any) -> str:
    """Return the path of a child, escaped as in a JSON pointer so that paths are unique."""
    if type(key) not in (int, str):
        raise CheckpointError(
            f"a checkpoint cannot hold the key {key!r} at {path or '/'}; use strings or whole numbers as keys."
        )
    if type(key) is str and re.fullmatch(r"-?\d+", key):
        return f"{path}/~2{key}"  # distinct from the path of the number
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _stripped(path: str, leaf: Any) -> Any:
    """Return a leaf as a JSON value; a tensor is replaced by its path."""
    if type(leaf) is float:
        return {"float": leaf.hex()}  # exact, and JSON has no infinities
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_meta:  # at the other server: only its shape is known here
        return {"shape": [str(leaf.dtype).removeprefix("torch."), list(leaf.shape)]}
    return {"tensor": path}


def _restored(tensors: Tensors, leaf: Any) -> Any:
    if type(leaf) is not dict:
        return leaf
    ((kind, content),) = leaf.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float.fromhex(content)
    dtype, shape = content
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run in one folder."""

    folder: Path

    def path(self, round: int) -> Path:
        """Return the path of the checkpoint of a round."""
        return self.folder / f"round-{round:06d}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, oldest first."""
        found = (re.fullmatch(r"round-(\d{6,})\.safetensors", path.name) for path in self.folder.glob("round-*"))
        return sorted(int(match[1]) for match in found if match)

    def save(self, round: int, content: Tree, manifest: dict[str, Any]) -> None:
        """Commit a checkpoint; remove older ones beyond KEEP, and later ones, which are left from before a rollback."""
        data = _encode(content, manifest)
        partial = self.path(round).with_name(self.path(round).name + _PARTIAL)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_partials()
            write_to_disk(partial, data)
            partial.replace(self.path(round))
            sync_folder(self.folder)
        except OSError as error:
            self._remove_partials()
            earlier = self.rounds()
            state = f"{self.path(earlier[-1]).name} is still good" if earlier else "there is no earlier checkpoint"
            raise CheckpointError(
                f"the checkpoint of round {round} could not be written to {self.folder}: {error.strerror or error}; "
                f"{state}. Make room there or choose another folder, then resume the run."
            ) from error
        self._prune(round)

    def load(self) -> tuple[Tree, dict[str, Any]]:
        """Return content and manifest of the newest checkpoint that is not damaged."""
        reasons = []
        for newest in reversed(self.rounds()):
            try:
                found = read(self.path(newest))
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

    def _prune(self, newest: int) -> None:
        kept = [round for round in self.rounds() if round <= newest][-KEEP:]
        for round in set(self.rounds()) - set(kept):
            with suppress(OSError):  # the checkpoint is committed; the next one tries again
                self.path(round).unlink()

    def _remove_partials(self) -> None:
        for leftover in self.folder.glob(f"round-*{_PARTIAL}"):
            with suppress(OSError):
                leftover.unlink()


def _encode(content: Tree, manifest: dict[str, Any]) -> bytes:
    """Return the bytes of a checkpoint file."""
    tensors, skeleton = pack(content)
    try:
        texts = {"skeleton": json.dumps(skeleton), "manifest": json.dumps(manifest)}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of a checkpoint must be plain JSON values: {error}.") from error
    try:
        return to_bytes(tensors, {**texts, "format": FORMAT, "digest": _digest(tensors, texts)})
    except KeyError as error:
        raise CheckpointError(f"a checkpoint cannot hold tensors of type {error}; convert them first.") from error


def _digest(tensors: Tensors, texts: dict[str, str]) -> str:
    """Return a hash over everything in a checkpoint."""
    digest = hashlib.blake2b(digest_size=16)
    for key in ("skeleton", "manifest"):
        digest.update(texts[key].encode() + b"\0")
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_to_disk(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until a rename in this folder is on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot sync a folder
        return
    handle = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> tuple[Tree, dict[str, Any]]:
    """Return content and manifest of one file, or raise a CheckpointError that names it and the reason."""
    try:
        with safe_open(path, "pt") as file:
            texts = file.metadata() or {}
            mapped = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if _digest(mapped, texts) != texts["digest"]:
                raise CheckpointError("its content does not match its digest")
            if texts.get("format") != FORMAT:
                raise CheckpointError(
                    f"it has the format {texts.get('format', 1)} of another version of cutlayer, and this one reads "
                    f"{FORMAT}; go on with the version that wrote it"
                )
            tensors = {name: tensor.clone() for name, tensor in mapped.items()}  # independent of the file
        return unpack(tensors, json.loads(texts["skeleton"])), json.loads(texts["manifest"])
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
