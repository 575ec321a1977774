"""A worker: a Ray actor that holds many virtual clients in one process.

Between rounds a client is nothing but a slice of the worker's samples and what it keeps; clients that keep equal values
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

from cutlayer import plugins
from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.core.precision import Precision
from cutlayer.core.program import Program
from cutlayer.data.arrays import Arrays
from cutlayer.data.augment import Augment
from cutlayer.remote.device.session import ClientDevice, Session
from cutlayer.remote.device.store import ClientStore, StoredValue
from cutlayer.remote.protocol.messages import KeptVersion, Work

DECODER = msgspec.msgpack.Decoder(Work)


class NumpyTensor(NamedTuple):
    """A tensor as numpy has it: bfloat16, which it has not, as the int16 of the same bits."""

    array: NDArray[Any]
    is_bfloat16: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "NumpyTensor":
        is_bfloat16 = tensor.dtype == torch.bfloat16
        plain = tensor.detach().cpu().contiguous()
        return cls((plain.view(torch.int16) if is_bfloat16 else plain).numpy(), is_bfloat16)

    def view(self) -> Tensor:
        """The tensor in the same memory, which others read: it must not be changed in place."""
        tensor = from_dlpack(self.array)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor

    def copy(self) -> Tensor:
        """The tensor in memory of its own."""
        return NumpyTensor(np.array(self.array), self.is_bfloat16).view()


class EncodedWork(NamedTuple):
    """Work for a client, encoded, and where the tensors that it takes lie."""

    client: int
    work: bytes
    tensors: list[int]


class EncodedAnswer(NamedTuple):
    """What a client says, encoded, and its tensors."""

    client: int
    message: bytes
    tensors: list[NumpyTensor]


@dataclass(frozen=True, kw_only=True)
class ClientSetup:
    """What all clients have in common."""

    method: Method
    batching: Batching
    augment: Augment | None
    precision: Precision = "fp32"


class WorkerSamples(NamedTuple):
    """The samples of a worker's clients, one client after another."""

    x: Any  # a tree of NumpyTensor
    y: NumpyTensor
    slices: dict[int, tuple[int, int]]  # first and last + 1 of each client

    @classmethod
    def of(cls, data: Arrays, index: Mapping[int, NDArray[np.int64]]) -> "WorkerSamples":
        ends = np.cumsum([len(rows) for rows in index.values()]).tolist()
        own = data.take(np.concatenate(list(index.values())))
        slices = {j: (end - len(index[j]), end) for j, end in zip(index, ends, strict=True)}
        x = {k: NumpyTensor.of(v) for k, v in own.x.items()} if isinstance(own.x, dict) else NumpyTensor.of(own.x)
        return cls(x, NumpyTensor.of(own.y), slices)


class VirtualClients:
    """The virtual clients of a worker."""

    def __init__(self, setup: ClientSetup, samples: WorkerSamples) -> None:
        self._setup, self._program = setup, Program(setup.method)
        # Views: batches are copied out of the samples, so nobody writes to them.
        x = {k: v.view() for k, v in samples.x.items()} if isinstance(samples.x, dict) else samples.x.view()
        self._samples, self._slices = Arrays(x=x, y=samples.y.view()), samples.slices
        self._stores: dict[int, ClientStore] = {}
        self._sessions: dict[int, Session] = {}

    def begin(self, sessions: Mapping[int, int]) -> dict[int, tuple[KeptVersion, ...]]:
        """These clients, and no others, are in a round, each in the session of this number: what they keep."""
        _share([self._stores[j] for j in self._sessions])
        self._sessions = {j: Session(self._device(j), number) for j, number in sessions.items()}
        return {j: session.device.store.statement() for j, session in self._sessions.items()}

    def work(self, orders: Sequence[EncodedWork], *bundles: Sequence[NumpyTensor]) -> list[EncodedAnswer]:
        """The answers of those clients that are asked for one."""
        arrays = [array for bundle in bundles for array in bundle]
        views: dict[int, Tensor] = {}
        results = []
        for client, content, places in orders:
            if client not in self._sessions:
                continue  # this process is not the one that the round began with
            for i in places:
                views.setdefault(i, arrays[i].view())
            reply = self._sessions[client].work(DECODER.decode(content), [views[i] for i in places])
            if reply is not None:
                sent = [NumpyTensor.of(a) for a in reply.tensors]
                results.append(EncodedAnswer(client, msgspec.msgpack.encode(reply.message), sent))
        return results

    def _device(self, client: int) -> ClientDevice:
        first, end = self._slices[client]
        own = Arrays(x=tree.map(lambda a: a[first:end], self._samples.x), y=self._samples.y[first:end])
        return ClientDevice(
            client=client,
            program=self._program,
            data=own,
            batching=self._setup.batching,
            store=self._stores.setdefault(client, ClientStore(client)),
            augment=self._setup.augment,
            precision=self._setup.precision,
        )


class Worker:
    """The Ray actor. One that has just started, perhaps again, holds no clients."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._clients: VirtualClients | None = None

    def prepare(self, paths: Sequence[str], files: Sequence[str]) -> None:
        """What a user's own method or model is imported from; asked before anything of it comes."""
        sys.path.extend(path for path in paths if path not in sys.path)
        plugins.load(map(Path, files))

    def load(self, setup: ClientSetup, samples: WorkerSamples) -> None:
        self._clients = VirtualClients(setup, samples)

    def begin(self, sessions: Mapping[int, int]) -> dict[int, tuple[KeptVersion, ...]] | None:
        return None if self._clients is None else self._clients.begin(sessions)

    def work(self, orders: Sequence[EncodedWork], *bundles: Sequence[NumpyTensor]) -> list[EncodedAnswer]:
        return [] if self._clients is None else self._clients.work(orders, *bundles)


def _share(stores: Sequence[ClientStore]) -> None:
    """What clients of the same round keep alike is kept once."""
    known: dict[str, list[StoredValue]] = {}
    for store in stores:
        for name, entry in store.entries.items():
            others = known.setdefault(name, [])
            same = next((o for o in others if _alike(o, entry)), entry)
            store.entries[name] = entry._replace(value=same.value)
            if same is entry:
                others.append(entry)


def _alike(a: StoredValue, b: StoredValue) -> bool:
    return a.version == b.version and tree.equal(a.value, b.value)
