"""A study of the cut for a run of your own: methods at every cut, on even and on uneven data."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cutlayer.recipes.compose import label, named, using
from cutlayer.recipes.recipe import Recipe, Sweep
from cutlayer.runs import build, config
from cutlayer.runs.config import Choice, Run
from cutlayer.split import Split

METHODS = ("sfl_v1", "sfl_v2")


def study(
    base: Run,
    *,
    methods: Sequence[str] = METHODS,
    cuts: Sequence[int | str] | None = None,
    alpha: float = 0.1,
    codecs: Mapping[str, Any] | None = None,
) -> Recipe:
    """Return the base run with these methods at these cuts, by default at all that leave units on both sides.

    With codecs, each run is made with each of them, for activations and gradients; they are by the words that stand for
    them in names.
    """
    # The client's layers grow with the cut, so sending them must take time.
    run = base if base.devices is not None else replace(base, devices=Choice("pool", {"model_sync": True}))
    numbers = _numbers(base, cuts)
    kinds = {"": run} if codecs is None else {f"-{word}": _encoded(run, codec) for word, codec in codecs.items()}
    panels = {
        panel: {
            f"{method}-cut{number}{word}": using(
                replace(own, partition=partition, cut=number), method, **_kept(base, method)
            )
            for method in methods
            for number in numbers
            for word, own in kinds.items()
        }
        for panel, partition in (("iid", Choice("iid")), ("dirichlet", _uneven(base.partition, alpha)))
    }
    name = f"{base.name.partition('/')[0]}_cuts{'' if codecs is None else '_codecs'}"
    return Recipe(runs=named(name, panels), figure=(Sweep(label="units at the client", x=_cut),))


def _encoded(run: Run, codec: Any) -> Run:
    """Return the run with this codec of what crosses the cut."""
    return config.changed(run, {"codecs": dict.fromkeys(("activations", "gradients"), codec)}, "--codecs")


def _numbers(base: Run, cuts: Sequence[int | str] | None) -> list[int]:
    """Return the cuts as numbers of units, which do not depend on the shape of the inputs."""
    with torch.device("meta"):
        split = Split(build.model(base.model.name, base.model.options), 1)
    if cuts is None:
        return list(range(1, split.num_units))
    return [split.with_cut(cut).cut for cut in cuts]


def _kept(base: Run, method: str) -> dict[str, Any]:
    return base.method.options if base.method.name == method else {}


def _uneven(partition: Choice, alpha: float) -> Choice:
    kept = partition.options if partition.name == "dirichlet" else {}
    return Choice("dirichlet", {**kept, "alpha": alpha})


def _cut(run: Run) -> float:
    return float(label(run).partition("-cut")[2].partition("-")[0])
