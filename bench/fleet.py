"""A server over gRPC with mutual TLS, and its clients in other processes of this machine: what benchmarks share."""

import multiprocessing
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from cutlayer import Arrays
from cutlayer.config import Run
from cutlayer.remote.certificates import Credentials
from cutlayer.remote.client import Guest, stay
from cutlayer.remote.join import Place
from cutlayer.remote.key_folder import Asked, carry_out
from cutlayer.remote.serve import Server, Serving, samples_of
from cutlayer.remote.status import Board

HOST = "127.0.0.1"
GIVES_UP = 20.0  # seconds without a server


class Member(NamedTuple):
    """One client: the folder of its keys, and the file of its samples."""

    keys: Path
    data: Path


class Fleet(NamedTuple):
    """A server that listens, and what it noted of its clients."""

    server: Server
    board: Board


@contextmanager
def fleet(run: Run, shares: Sequence[Arrays], processes: int) -> Iterator[Fleet]:
    """Serve this run to clients with these samples, spread over so many processes of one thread each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        carry_out(folder / "keys", Asked(clients=str(len(shares)), hosts=[HOST]))
        folders = sorted((folder / "keys" / "clients").iterdir())
        members = [
            Member(k, _stored(share, folder / f"{k.name}.npz")) for k, share in zip(folders, shares, strict=True)
        ]
        serving = Serving(listen=f"{HOST}:0", keys=folder / "keys" / "train", deadline=600.0)
        board = Board(name=run.name, method=run.method.name, rounds=run.rounds)
        server = Server(run, serving, board, samples_of(run, None, None))
        crews = []
        try:
            with server.open() as address:
                crews = [_started(address, members[k::processes]) for k in range(processes)]
                yield Fleet(server, board)
                server.done()
            for crew in crews:
                crew.join()
        finally:
            for crew in crews:
                crew.terminate()


def _started(address: str, members: Sequence[Member]) -> SpawnProcess:
    process = multiprocessing.get_context("spawn").Process(target=take_part, args=(address, members))
    process.start()
    return process


def _stored(share: Arrays, path: Path) -> Path:
    assert isinstance(share.x, torch.Tensor)
    np.savez(path, x=share.x.numpy(), y=share.y.numpy())
    return path


def take_part(address: str, members: Sequence[Member]) -> None:
    """All of these clients, each in a thread of its own, until the run is over."""
    torch.set_num_threads(1)
    threads = [threading.Thread(target=_join, args=(address, member)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _join(address: str, member: Member) -> None:
    credentials = Credentials.load(member.keys)
    guest = Guest(
        address=address,
        name=credentials.name,
        credentials=credentials,
        plugins={},
        ready=Place(data=str(member.data)).ready,
        gives_up_after=GIVES_UP,
    )
    stay(guest)
