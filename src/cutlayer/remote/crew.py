"""A crew: many virtual clients in one process, as a Ray actor holds them.

Between rounds a client is nothing but a slice of the crew's samples and what it keeps; clients that keep equal values
share them. Tensors travel as numpy arrays, which Ray puts into memory that all processes of a machine share.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from cutlayer import plugins, tree
from cutlayer.batches import Batching
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment
from cutlayer.methods.base import Method
from cutlayer.precision import Precision
from cutlayer.program import Program
from cutlayer.remote.messages import Kept, Work
from cutlayer.remote.session import Device, Session
from cutlayer.remote.trees import flatten
from cutlayer.remote.vault import Entry, Vault

DECODER = msgspec.msgpack.Decoder(Work)


class Sheet(NamedTuple):
    """A tensor as numpy has it: bfloat16, which it has not, as the int16 of the same bits."""

    array: NDArray[Any]
    is_bfloat16: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Sheet":
        is_bfloat16 = tensor.dtype == torch.bfloat16
        plain = tensor.detach().cpu().contiguous()
        return cls((plain.view(torch.int16) if is_bfloat16 else plain).numpy(), is_bfloat16)

    def view(self) -> Tensor:
        """The tensor in the same memory, which others read: it must not be changed in place."""
        tensor = from_dlpack(self.array)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor

    def copy(self) -> Tensor:
        """The tensor in memory of its own."""
        return Sheet(np.array(self.array), self.is_bfloat16).view()


class Order(NamedTuple):
    """Work for a client, encoded, and where the tensors that it takes lie."""

    client: int
    work: bytes
    tensors: list[int]


class Result(NamedTuple):
    """What a client says, encoded, and its tensors."""

    client: int
    message: bytes
    tensors: list[Sheet]


@dataclass(frozen=True, kw_only=True)
class Kit:
    """What every client has."""

    method: Method
    batching: Batching
    augment: Augment | None
    precision: Precision = "fp32"


class Share(NamedTuple):
    """The samples of a crew's clients, one client after another."""

    x: Any  # a tree of sheets
    y: Sheet
    slices: dict[int, tuple[int, int]]  # first and last + 1 of each client

    @classmethod
    def of(cls, data: Arrays, index: Mapping[int, NDArray[np.int64]]) -> "Share":
        ends = np.cumsum([len(rows) for rows in index.values()]).tolist()
        own = data.take(np.concatenate(list(index.values())))
        slices = {j: (end - len(index[j]), end) for j, end in zip(index, ends, strict=True)}
        x = {k: Sheet.of(v) for k, v in own.x.items()} if isinstance(own.x, dict) else Sheet.of(own.x)
        return cls(x, Sheet.of(own.y), slices)


class Crew:
    """Some virtual clients side by side."""

    def __init__(self, kit: Kit, share: Share) -> None:
        self._kit, self._program = kit, Program(kit.method)
        # Views: batches are copied out of the samples, so nobody writes to them.
        x = {k: v.view() for k, v in share.x.items()} if isinstance(share.x, dict) else share.x.view()
        self._samples, self._slices = Arrays(x=x, y=share.y.view()), share.slices
        self._vaults: dict[int, Vault] = {}
        self._sessions: dict[int, Session] = {}

    def meet(self, sessions: Mapping[int, int]) -> dict[int, tuple[Kept, ...]]:
        """These clients, and no others, are in a round, each in the session of this number: what they keep."""
        _share([self._vaults[j] for j in self._sessions])
        self._sessions = {j: Session(self._device(j), number) for j, number in sessions.items()}
        return {j: session.device.vault.statement() for j, session in self._sessions.items()}

    def work(self, orders: Sequence[Order], *bundles: Sequence[Sheet]) -> list[Result]:
        """The answers of those clients that are asked for one."""
        sheets = [sheet for bundle in bundles for sheet in bundle]
        views: dict[int, Tensor] = {}
        results = []
        for client, content, places in orders:
            if client not in self._sessions:
                continue  # this process is not the one that the round began with
            for i in places:
                views.setdefault(i, sheets[i].view())
            reply = self._sessions[client].work(DECODER.decode(content), [views[i] for i in places])
            if reply is not None:
                sent = [Sheet.of(a) for a in reply.tensors]
                results.append(Result(client, msgspec.msgpack.encode(reply.message), sent))
        return results

    def _device(self, client: int) -> Device:
        first, end = self._slices[client]
        own = Arrays(x=tree.map(lambda a: a[first:end], self._samples.x), y=self._samples.y[first:end])
        return Device(
            client=client,
            program=self._program,
            data=own,
            batching=self._kit.batching,
            vault=self._vaults.setdefault(client, Vault(client)),
            augment=self._kit.augment,
            precision=self._kit.precision,
        )


class Host:
    """The process of a crew. One that has just started, perhaps again, has nobody in it."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._crew: Crew | None = None

    def prepare(self, paths: Sequence[str], files: Sequence[str]) -> None:
        """What a user's own method or model is imported from; asked before anything of it comes."""
        sys.path.extend(path for path in paths if path not in sys.path)
        plugins.load(map(Path, files))

    def board(self, kit: Kit, share: Share) -> None:
        self._crew = Crew(kit, share)

    def meet(self, sessions: Mapping[int, int]) -> dict[int, tuple[Kept, ...]] | None:
        return None if self._crew is None else self._crew.meet(sessions)

    def work(self, orders: Sequence[Order], *bundles: Sequence[Sheet]) -> list[Result]:
        return [] if self._crew is None else self._crew.work(orders, *bundles)


def _share(vaults: Sequence[Vault]) -> None:
    """What clients of the same round keep alike is kept once."""
    known: dict[str, list[Entry]] = {}
    for vault in vaults:
        for name, entry in vault.entries.items():
            others = known.setdefault(name, [])
            same = next((o for o in others if _alike(o, entry)), entry)
            vault.entries[name] = entry._replace(value=same.value)
            if same is entry:
                others.append(entry)


def _alike(a: Entry, b: Entry) -> bool:
    if a.version != b.version:
        return False
    ours, theirs = flatten(a.value), flatten(b.value)
    return (
        ours.skeleton == theirs.skeleton
        and ours.numbers == theirs.numbers
        and all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(ours.tensors, theirs.tensors, strict=True))
    )
