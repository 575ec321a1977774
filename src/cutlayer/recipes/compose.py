"""Runs made of pieces: one run with another method, another optimiser setting, another name."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cutlayer.runs.config import Choice, Run


def decayed(lr: float, decay: float = 0.998) -> dict[str, Any]:
    """A learning rate that falls by a factor after every round."""
    return {"schedule": "exponential", "lr": lr, "decay": decay}


def cosine(lr: float, rounds: int) -> dict[str, Any]:
    """A learning rate that falls to 0 along half a cosine."""
    return {"schedule": "cosine", "lr": lr, "rounds": rounds}


def drawn_by_torch(model: str, **options: Any) -> Choice:
    """A network with torch's own initial weights: papers that name none, and whose code draws none, have those."""
    return Choice(model, {"init": "torch", **options})


def using(run: Run, method: str, **options: Any) -> Run:
    """The run with this method."""
    return replace(run, method=Choice(method, options))


def trained(run: Run, **options: Any) -> Run:
    """The run with these options of its optimiser added or changed."""
    return replace(run, optimiser=Choice(run.optimiser.name, {**run.optimiser.options, **options}))


def with_steps(run: Run, steps: int) -> Run:
    """The run with as many local steps for every client."""
    return replace(run, batching=replace(run.batching, steps=steps))


def named(recipe: str, panels: Mapping[str, Mapping[str, Run]]) -> tuple[Run, ...]:
    """The runs of all panels, as <recipe>/<panel>/<label>."""
    return tuple(
        replace(run, name=f"{recipe}/{panel}/{label}") for panel, runs in panels.items() for label, run in runs.items()
    )


def label(run: Run) -> str:
    """The last word of a run's name."""
    return run.name.rpartition("/")[2]
