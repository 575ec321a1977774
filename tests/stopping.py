"""Helpers for tests of resuming: stop a run, run it without a stop, and collect everything that a run leaves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutlayer.core.batches import Batching
from cutlayer.data import Augment
from cutlayer.runs.checkpoint import pack, read
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.stopping import Record
from cutlayer.runs.training import Training

SMALL = Run(
    name="small",
    clients=6,
    per_round=4,
    partition=Choice("dirichlet", {"alpha": 0.5, "min_size": 16}),
    model=Choice("cnn", {"width": 2, "norm": "batch"}),
    optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.9}),
    batching=Batching(size=8, steps=2),
    augment=Augment(crop=1, flip=True),
    devices=Choice("pool"),
    rounds=5,
    engine="loop",
)


class Stopped(Exception):
    """Stands for anything that ends a process."""


def stop_after(number: int) -> Callable[[Training, Record], None]:
    def on_round(_: Training, record: Record) -> None:
        if record["round"] == number:
            raise Stopped

    return on_round


def stopped(run: Run, folder: Folder, number: int = 3) -> Folder:
    """The folder of a run that ended after this round."""
    with pytest.raises(Stopped):
        execute(run, folder, on_round=stop_after(number))
    return folder


def unbroken(run: Run, path: Path) -> Folder:
    """The folder of the same run, never stopped."""
    folder = Folder(path / "unbroken")
    execute(run, folder)
    return folder


def outcome(folder: Folder) -> dict[str, Any]:
    """Return everything that a run leaves, except wall times."""
    files = (folder.config, folder.environment, folder.metrics, folder.ledger, folder.model)
    left: dict[str, Any] = {file.name: file.read_bytes() for file in files}
    left["rounds timed"] = [line["round"] for line in folder.times()]
    for number in folder.store.rounds():
        content, manifest = read(folder.store.path(number))
        tensors, skeleton = pack(content)
        exact = {name: (str(a.dtype), a.shape, a.numpy().tobytes()) for name, a in tensors.items()}
        left[f"checkpoint {number}"] = (exact, skeleton, manifest)
    return left
