"""Recipes and runs made of pieces: one run with another method, another optimiser setting, another name."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cutlayer.recipes.published import PUBLISHED
from cutlayer.recipes.recipe import Recipe, Sweep
from cutlayer.runs.config import Choice, Run

Runs = dict[str, Run]  # by label
Panels = Mapping[str, Runs]  # by name; a recipe of one panel may leave it nameless
EXPERIMENTS: dict[str, Callable[[], Recipe]] = {}


def experiment(
    *, against: Callable[[str], str] | None = None, figure: tuple[Sweep, ...] = ()
) -> Callable[[Callable[[], Panels]], Callable[[], Recipe]]:
    """Make a recipe of a function that returns its panels.

    All else about the recipe is in the paper's file, under the function's name. `against` maps the label of a run to
    that of the run it is compared with, in the same panel; `figure` is the recipe's.
    """

    def register(panels: Callable[[], Panels]) -> Callable[[], Recipe]:
        name = panels.__name__

        def recipe() -> Recipe:
            runs = named(name, panels())
            rivals = {run.name: _beside(run, against(label(run))) for run in runs} if against is not None else {}
            return replace(PUBLISHED[name], runs=runs, against=rivals, figure=figure)

        recipe.__doc__ = PUBLISHED[name].title
        EXPERIMENTS[name] = recipe
        return recipe

    return register


def named(recipe: str, panels: Panels) -> tuple[Run, ...]:
    """Return the runs of all panels, as <recipe>/<panel>/<label>."""
    return tuple(
        replace(run, name="/".join(filter(None, (recipe, panel, label))))
        for panel, runs in panels.items()
        for label, run in runs.items()
    )


def label(run: Run) -> str:
    """Return the last word of a run's name."""
    return run.name.rpartition("/")[2]


def _beside(run: Run, label: str) -> str:
    """Return the name of the run with this label in the same panel."""
    return f"{run.name.rpartition('/')[0]}/{label}"


def decayed(lr: float, decay: float = 0.998) -> dict[str, Any]:
    """Return a learning rate that falls by a factor after every round."""
    return {"schedule": "exponential", "lr": lr, "decay": decay}


def cosine(lr: float, rounds: int) -> dict[str, Any]:
    """Return a learning rate that falls to 0 along half a cosine."""
    return {"schedule": "cosine", "lr": lr, "rounds": rounds}


def drawn_by_torch(model: str, **options: Any) -> Choice:
    """Return a network with torch's initial weights, for papers that name none and whose code draws none."""
    return Choice(model, {"init": "torch", **options})


def using(run: Run, method: str, **options: Any) -> Run:
    """Return the run with this method."""
    return replace(run, method=Choice(method, options))


def trained(run: Run, **options: Any) -> Run:
    """Return the run with these options of its optimiser added or changed."""
    return replace(run, optimiser=Choice(run.optimiser.name, {**run.optimiser.options, **options}))


def batched(run: Run, **changes: Any) -> Run:
    """Return the run with these settings of its batches changed."""
    return replace(run, batching=replace(run.batching, **changes))


def momentum_sgd(lr: Any, weight_decay: float = 5e-4) -> Choice:
    """Return SGD with a momentum of 0.9."""
    return Choice("sgd", {"lr": lr, "momentum": 0.9, "weight_decay": weight_decay})


def dirichlet(alpha: float, min_size: int) -> Choice:
    """Return an uneven partition with at least `min_size` samples a client; below a batch a client could not train."""
    return Choice("dirichlet", {"alpha": alpha, "min_size": min_size})


SMALL = Run(data="fashion_mnist", model=Choice("cnn", {"width": 16}), cut="conv1")  # for a small machine
