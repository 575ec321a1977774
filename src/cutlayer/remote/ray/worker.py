"""A worker: a Ray actor that holds many virtual clients in one process.

Between rounds a client is only a slice of the worker's samples and the values that it keeps; clients that keep equal
values share them. Tensors travel as numpy arrays, which Ray puts into memory that all processes of a machine share.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
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
from cutlayer.data.arrays import Arrays
from cutlayer.remote.device.session import ClientDevice, Session
from cutlayer.remote.device.store import ClientStore
from cutlayer.remote.protocol.messages import KeptVersion, Work

DECODER = msgspec.msgpack.Decoder(Work)


class NumpyTensor(NamedTuple):
    """A tensor as a numpy array; numpy has no bfloat16, so that type is stored as the int16 of the same bits."""

    array: NDArray[Any]
    is_bfloat16: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "NumpyTensor":
        is_bfloat16 = tensor.dtype == torch.bfloat16
        plain = tensor.detach().cpu().contiguous()
        return cls((plain.view(torch.int16) if is_bfloat16 else plain).numpy(), is_bfloat16)

    def view(self) -> Tensor:
        """Return the tensor in the same, shared memory; it must not be changed in place."""
        tensor = from_dlpack(self.array)
        return tensor.view(torch.bfloat16) if self.is_bfloat16 else tensor

    def copy(self) -> Tensor:
        """Return the tensor in memory of its own."""
        return NumpyTensor(np.array(self.array), self.is_bfloat16).view()


# A message to or from a client: the client, the bytes and the tensors (to a client, their places in the bundles).
Encoded = tuple[int, bytes, list[Any]]


class WorkerSamples(NamedTuple):
    """The samples of a worker's clients, one client after another."""

    structure: tree.Structure  # of inputs and targets
    tensors: list[NumpyTensor]
    slices: dict[int, slice]  # of each client

    @classmethod
    def of(cls, data: Arrays, index: Mapping[int, NDArray[np.int64]]) -> "WorkerSamples":
        own = data.take(np.concatenate(list(index.values())))
        structure, tensors = tree.flatten((own.x, own.y))
        ends = np.cumsum([len(rows) for rows in index.values()]).tolist()
        slices = {j: slice(end - len(index[j]), end) for j, end in zip(index, ends, strict=True)}
        return cls(structure, [NumpyTensor.of(a) for a in tensors], slices)


class VirtualClients:
    """The virtual clients of a worker."""

    def __init__(self, new_device: Callable[..., ClientDevice], samples: WorkerSamples) -> None:
        self._new_device, self._slices = new_device, samples.slices  # a device lacks its number, data and store
        # Views are enough: batches are copied out of the samples, so nobody writes to them.
        self._samples = tree.unflatten(samples.structure, [a.view() for a in samples.tensors])
        self._stores: dict[int, ClientStore] = {}
        self._sessions: dict[int, Session] = {}

    def begin(self, sessions: Mapping[int, int]) -> dict[int, tuple[KeptVersion, ...]]:
        """Open a session of this number for each client of a round, close all others; return what the clients keep."""
        _share([self._stores[j] for j in self._sessions])
        self._sessions = {j: Session(self._device(j), number) for j, number in sessions.items()}
        return {j: session.device.store.statement() for j, session in self._sessions.items()}

    def work(self, orders: Sequence[Encoded], *bundles: Sequence[NumpyTensor]) -> list[Encoded]:
        """Run the work of each client and return their answers, if they were asked for one."""
        views = [array.view() for bundle in bundles for array in bundle]
        results: list[Encoded] = []
        for client, content, places in orders:
            if client not in self._sessions:
                continue  # the actor has restarted since the round began
            reply = self._sessions[client].work(DECODER.decode(content), [views[i] for i in places])
            if reply is not None:
                sent = [NumpyTensor.of(a) for a in reply.tensors]
                results.append((client, msgspec.msgpack.encode(reply.message), sent))
        return results

    def _device(self, client: int) -> ClientDevice:
        x, y = tree.map(lambda a: a[self._slices[client]], self._samples)
        store = self._stores.setdefault(client, ClientStore(client))
        return self._new_device(client=client, data=Arrays(x=x, y=y), store=store)


class Worker:
    """The Ray actor. After a start or a restart it holds no clients until a round begins."""

    def __init__(self, paths: Sequence[str], files: Sequence[str]) -> None:
        torch.set_num_threads(1)
        sys.path.extend(path for path in paths if path not in sys.path)
        plugins.load(map(Path, files))
        self._clients: VirtualClients | None = None

    def begin(self, sessions: Mapping[int, int], content: Sequence[Any]) -> dict[int, tuple[KeptVersion, ...]]:
        """Begin a round with the clients of this content, which lies in Ray's object store."""
        if self._clients is None:
            import ray

            self._clients = VirtualClients(*ray.get(content))
        return self._clients.begin(sessions)

    def work(self, orders: Sequence[Encoded], *bundles: Sequence[NumpyTensor]) -> list[Encoded]:
        return [] if self._clients is None else self._clients.work(orders, *bundles)


def _share(stores: Sequence[ClientStore]) -> None:
    """Let clients of the same round that keep equal values share one copy."""
    known: dict[tuple[str, int], list[tree.Tree]] = {}
    for store in stores:
        for name, entry in store.entries.items():
            values = known.setdefault((name, entry.version), [])
            same = next((value for value in values if tree.equal(value, entry.value)), None)
            if same is None:
                values.append(entry.value)
            else:
                store.entries[name] = entry._replace(value=same)
