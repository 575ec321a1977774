"""A run that kills itself at some moment of a round, as a power cut would.

Called as a script: python killed_run.py CONFIG FOLDER MOMENT ROUND
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cutlayer.core.places import Clients
from cutlayer.runs import checkpoint, config, folder, run
from cutlayer.runs.simulation import Simulation


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patch(owner: Any, name: str, new: Callable[..., Any]) -> None:
    """Replace a function by new(old, *args)."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: new(old, *args, **options))


def half_of(path: Path, data: bytes) -> None:
    """Write half of the data, then die."""
    with path.open("ab") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        die()


def in_a_round(number: int) -> None:
    """At the clients' third computation: when the round's second step has begun."""
    done: list[int] = []

    def do(old: Any, self: Clients, *args: Any) -> Any:
        if about[0].state.round == number - 1:
            done.append(1)
            if len(done) == 3:
                die()
        return old(self, *args)

    patch(Clients, "do", do)


def in_a_metrics_line(number: int) -> None:
    def append(old: Any, path: Path, record: dict[str, Any]) -> None:
        if path.name == "metrics.jsonl" and record["round"] == number:
            half_of(path, folder._line(record).encode())
        old(path, record)

    patch(run, "append_line", append)


def after_a_metrics_line(number: int) -> None:
    def append(old: Any, path: Path, record: dict[str, Any]) -> None:
        old(path, record)
        if path.name == "metrics.jsonl" and record["round"] == number:
            die()

    patch(run, "append_line", append)


def in_a_checkpoint(number: int) -> None:
    def write(old: Any, path: Path, data: bytes) -> None:
        if f"{number:06d}" in path.name:
            half_of(path, data)
        old(path, data)

    patch(checkpoint, "write_to_disk", write)


def before_a_checkpoint_is_in_place(number: int) -> None:
    def write(old: Any, path: Path, data: bytes) -> None:
        old(path, data)
        if f"{number:06d}" in path.name:
            die()

    patch(checkpoint, "write_to_disk", write)


def after_a_checkpoint(number: int) -> None:
    def tell(old: Any, training: Any, *args: Any) -> Any:
        record = old(training, *args)
        if record["round"] == number:
            die()
        return record

    patch(run, "_round", tell)


def in_the_first_round(_: int) -> None:
    patch(Simulation, "round", lambda old, *args: die())


def before_the_model_is_written(_: int) -> None:
    def write(old: Any, path: Path, *content: Any) -> None:
        if path.suffix == ".safetensors":
            die()
        old(path, *content)

    patch(run, "write", write)


MOMENTS = {
    moment.__name__: moment
    for moment in (
        in_the_first_round,
        in_a_round,
        in_a_metrics_line,
        after_a_metrics_line,
        in_a_checkpoint,
        before_a_checkpoint_is_in_place,
        after_a_checkpoint,
        before_the_model_is_written,
    )
}

about: list[Any] = []  # the training under way

if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen, where, moment, number = sys.argv[1:]
    MOMENTS[moment](int(number))
    whole = config.changed(config.Run(), config.read(Path(chosen)), chosen)
    run.execute(whole, run.Folder(Path(where)), on_start=about.append)
