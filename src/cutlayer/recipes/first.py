"""First experiments: the five basic methods side by side on image data with uneven classes."""

from dataclasses import replace

from cutlayer.core.batches import Batching
from cutlayer.recipes.compose import SMALL, Panels, dirichlet, experiment, using
from cutlayer.recipes.smofi import CIFAR10
from cutlayer.runs.config import Choice, Run

BASIC_METHODS = ("fedavg", "sl", "sfl_v1", "sfl_v2", "mergesfl")


def _side_by_side(run: Run) -> Panels:
    return {"": {method: using(run, method) for method in BASIC_METHODS}}


@experiment()
def digits() -> Panels:
    run = replace(
        SMALL,
        data="digits",
        clients=20,
        per_round=10,
        partition=dirichlet(0.3, 8),
        # No momentum: a server that never resets it (SL, SFL-V2) would carry one client's classes over to the next.
        optimiser=Choice("sgd", {"lr": 0.1}),
        batching=Batching(size=8),
        rounds=40,
        cpu_threads=1,
    )
    return _side_by_side(run)


@experiment()
def fashion_mnist() -> Panels:
    run = replace(
        SMALL,
        clients=50,
        per_round=10,
        partition=dirichlet(0.2, 32),
        optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.9}),
        batching=Batching(size=32),
        rounds=40,
    )
    return _side_by_side(run)


@experiment()
def cifar10() -> Panels:
    return _side_by_side(replace(CIFAR10.run, model=Choice("resnet18"), eval_every=10))
