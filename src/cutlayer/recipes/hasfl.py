"""What the recipes of the HASFL paper (Lin et al. 2025) share: its two data sets, its devices and its five policies."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cutlayer.batches import Batching
from cutlayer.config import Choice, Run
from cutlayer.planning.policy import BASELINES
from cutlayer.recipes.compose import drawn_by_torch, using

PARTITIONS: Mapping[str, Choice] = {"iid": Choice("iid"), "shards": Choice("shards", {"per_client": 2})}
INTERVAL = 15
BATCH = 16  # where it is fixed
CUT = 8  # where it is fixed: of the 16 layers of VGG-16
LEAST_BATCH = 8  # where it is planned: the networks of the paper's recipes have BatchNorm, which needs a few samples


def table1(**changes: Any) -> Choice:
    """The devices of Table I, with these figures changed."""
    return Choice("table1", changes)


def _run(data: str, model: Choice, cut: int) -> Run:
    return Run(
        data=data,
        clients=20,
        partition=PARTITIONS["iid"],
        model=model,
        cut=cut,
        optimiser=Choice("sgd", {"lr": 5e-4}),
        batching=Batching(size=BATCH),
        devices=table1(),
        rounds=1000,
        checkpoint_every=10,
    )


CIFAR10 = _run("cifar10", drawn_by_torch("vgg16", norm="batch", classifier=(512, 512)), CUT)
CIFAR100 = _run("cifar100", drawn_by_torch("resnet18"), 5)  # half of the ten: stem, eight blocks, head


def with_plan(run: Run, batches: str, cuts: str, interval: int = INTERVAL, **options: Any) -> Run:
    """The run with HASFL's training loop, and batch sizes and cuts by these rules."""
    given = {"interval": interval, "batches": batches, "cuts": cuts, "least_batch": LEAST_BATCH, **options}
    return using(run, "hasfl", **given)


def policies(run: Run, interval: int = INTERVAL, **options: Any) -> dict[str, Run]:
    """The run with each of the five policies."""
    return {label: with_plan(run, *rules, interval, **options) for label, rules in BASELINES.items()}


def dealt(run: Run, partition: str) -> Run:
    return replace(run, partition=PARTITIONS[partition])
