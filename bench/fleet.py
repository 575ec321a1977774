"""A server over gRPC with mutual TLS, and its clients in other processes of this machine: what benchmarks share."""

import multiprocessing
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cutlayer import Arrays
from cutlayer.remote.device.client import JoinOptions, stay
from cutlayer.remote.device.session import ClientDevice
from cutlayer.remote.identity.certificates import Credentials
from cutlayer.remote.identity.trial import trial
from cutlayer.remote.joining.join import DeviceSettings
from cutlayer.remote.monitor.status import Board
from cutlayer.remote.protocol.messages import Welcome
from cutlayer.remote.server.serve import RunServer, Serving, samples_of
from cutlayer.runs.config import Run

HOST = "127.0.0.1"
GIVES_UP = 20.0  # seconds without a server


class Member(NamedTuple):
    """One client: the folder of its keys, and the file of its samples."""

    keys: Path
    data: Path


class Fleet(NamedTuple):
    """A server that listens, and what it noted of its clients."""

    server: RunServer
    board: Board


@contextmanager
def fleet(run: Run, shares: Sequence[Arrays], processes: int, *, trusting: bool = False) -> Iterator[Fleet]:
    """Serve this run to clients with these samples, spread over so many processes of one thread each.

    Trusting clients do not check what they are asked against their own copy of the method.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial(folder / "keys", clients=str(len(shares)), hosts=[HOST])
        folders = sorted((folder / "keys" / "clients").iterdir())
        members = [
            Member(k, _stored(share, folder / f"{k.name}.npz")) for k, share in zip(folders, shares, strict=True)
        ]
        serving = Serving(listen=f"{HOST}:0", keys=folder / "keys" / "train", deadline=600.0)
        board = Board(name=run.name, method=run.method.name, rounds=run.rounds)
        server = RunServer(run, serving, board, samples_of(run, None, None))
        workers = []
        try:
            with server.open() as address:
                workers = [_started(address, members[k::processes], trusting) for k in range(processes)]
                yield Fleet(server, board)
                server.done()
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                worker.terminate()


def _started(address: str, members: Sequence[Member], trusting: bool) -> SpawnProcess:
    process = multiprocessing.get_context("spawn").Process(target=take_part, args=(address, members, trusting))
    process.start()
    return process


def _stored(share: Arrays, path: Path) -> Path:
    assert isinstance(share.x, torch.Tensor)
    np.savez(path, x=share.x.numpy(), y=share.y.numpy())
    return path


def take_part(address: str, members: Sequence[Member], trusting: bool) -> None:
    """All of these clients, each in a thread of its own, until the run is over."""
    torch.set_num_threads(1)
    threads = [threading.Thread(target=_join, args=(address, member, trusting)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _join(address: str, member: Member, trusting: bool) -> None:
    credentials, settings = Credentials.load(member.keys), DeviceSettings(data=str(member.data))

    def ready(welcome: Welcome) -> ClientDevice:
        device = settings.ready(welcome)
        return replace(device, terms=None) if trusting else device

    options = JoinOptions(
        address=address,
        name=credentials.name,
        credentials=credentials,
        plugins={},
        ready=ready,
        gives_up_after=GIVES_UP,
    )
    stay(options)
