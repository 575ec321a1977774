"""The HASFL paper (Lin et al. 2025): its data sets, devices and five policies, Table I and the figures with results."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.planning.policy import BASELINES
from cutlayer.recipes.compose import SMALL, Panels, Runs, batched, drawn_by_torch, experiment, label, using
from cutlayer.recipes.recipe import Apart, Sweep
from cutlayer.runs.config import Choice, Run

PARTITIONS: Mapping[str, Choice] = {"iid": Choice("iid"), "shards": Choice("shards", {"per_client": 2})}
INTERVAL = 15
BATCH = 16  # where it is fixed
CUT = 8  # where it is fixed: of the 16 layers of VGG-16
LEAST_BATCH = 8  # where it is planned: BatchNorm in the paper's networks needs a few samples
TABLE1: Mapping[str, float | tuple[float, float]] = {
    "tflops": (1.0, 2.0),
    "server_tflops": 20.0,
    "mbits_up": (75.0, 80.0),
    "mbits_servers": (360.0, 380.0),
}


def table1(**changes: Any) -> Choice:
    """Return the devices of Table I with these figures changed."""
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


def with_plan(run: Run, batches: str, cuts: str, least_batch: int = LEAST_BATCH) -> Run:
    """Return the run with HASFL's training loop and with batch sizes and cuts by these rules."""
    return using(run, "hasfl", interval=INTERVAL, batches=batches, cuts=cuts, least_batch=least_batch)


def policies(run: Run, least_batch: int = LEAST_BATCH) -> Runs:
    """Return the run with each of the five policies."""
    return {label: with_plan(run, *rules, least_batch) for label, rules in BASELINES.items()}


def dealt(runs: Runs, partitions: Iterable[str] = PARTITIONS, data: str = "cifar10") -> Panels:
    """Return a panel of these runs for each partition."""
    return {
        f"{data}-{word}": {label: replace(run, partition=PARTITIONS[word]) for label, run in runs.items()}
        for word in partitions
    }


# An experiment of our own, for a small machine.

ROUNDS = 100  # at most
TARGET = 0.75  # test accuracy at which a run ends

FASHION_MNIST = replace(
    SMALL,
    optimiser=Choice("sgd", {"lr": 0.05}),
    batching=Batching(size=BATCH),
    rounds=ROUNDS,
    until_accuracy=TARGET,
    engine="loop",  # the same on every machine
    cpu_threads=1,
    checkpoint_every=5,
)
DEVICES = {
    "table1": table1(),
    "strong": table1(tflops=(0.1, 2.0), mbits_up=(10.0, 80.0)),
}


@experiment()
def hasfl_fashion_mnist() -> Panels:
    return {
        f"{word}-{devices}": policies(
            replace(FASHION_MNIST, partition=partition, devices=DEVICES[devices]), least_batch=1
        )
        for (word, partition), devices in product(PARTITIONS.items(), DEVICES)
    }


# Table I, and the figures that show results.

BATCHES = (8, 16, 32, 64)  # Figure 2; the first three are those of Figure 10
CUTS = (4, 8, 12)  # Figures 3 and 11
NUMBERS = (10, 20, 30, 40)  # of devices, Figure 9
FACTORS = (0.25, 0.5, 2.0)  # Figures 7 and 8: times Table I's figures, which are run too
BARS = Sweep(label="", x=label, series=label, bars=True)
BY_BATCH = {f"b{size}": with_plan(batched(CIFAR10, size=size), "fixed", "fixed") for size in BATCHES}
BY_CUT = {f"cut{cut}": with_plan(replace(CIFAR10, cut=cut), "fixed", "fixed") for cut in CUTS}


@experiment()
def hasfl_table1() -> Panels:
    return {"cifar10-iid": {"hasfl": policies(CIFAR10)["hasfl"]}}


@experiment()
def hasfl_fig2() -> Panels:
    return dealt(BY_BATCH, ["shards"])


@experiment()
def hasfl_fig3() -> Panels:
    return dealt(BY_CUT, ["shards"])


@experiment()
def hasfl_fig5() -> Panels:
    return {**dealt(policies(CIFAR10)), **dealt(policies(CIFAR100), data="cifar100")}


@experiment(figure=(BARS,))
def hasfl_fig6() -> Panels:
    return {**dealt(policies(CIFAR10)), **dealt(policies(CIFAR100), data="cifar100")}


def _same_setting(label: str) -> str:
    """Return HASFL's label in the same setting: hasfl-n10 for rbs_rms-n10."""
    return "".join(("hasfl", *label.partition("-")[1:]))


def _policy(run: Run) -> str:
    return label(run).partition("-")[0]


def _by_figure(axis: str, key: str) -> Sweep:
    """Return a sweep over one figure of Table I; runs with Table I unchanged belong to every sweep."""

    def place(run: Run) -> float | Apart:
        options = {} if run.devices is None else run.devices.options
        if options and key not in options:
            return Apart.ABSENT
        value = options.get(key, TABLE1[key])
        return sum(value) / len(value) if isinstance(value, tuple) else float(value)

    return Sweep(label=axis, x=place, series=_policy, log=True)


def _by_resources(keys: Mapping[str, str]) -> Panels:
    """Return runs with Table I, and with each of these figures made smaller and larger."""
    runs = policies(CIFAR10)
    for (word, key), factor in product(keys.items(), FACTORS):
        limits = TABLE1[key]
        value = tuple(factor * limit for limit in limits) if isinstance(limits, tuple) else factor * limits
        changed = policies(replace(CIFAR10, devices=table1(**{key: value})))
        runs |= {f"{policy}-{word}{factor:g}": run for policy, run in changed.items()}
    return {"cifar10-iid": runs}


@experiment(
    against=_same_setting,
    figure=(_by_figure("TFLOPS of a device, mean", "tflops"), _by_figure("TFLOPS of the server", "server_tflops")),
)
def hasfl_fig7() -> Panels:
    return _by_resources({"device": "tflops", "server": "server_tflops"})


@experiment(
    against=_same_setting,
    figure=(_by_figure("Mbit/s up, mean", "mbits_up"), _by_figure("Mbit/s between servers, mean", "mbits_servers")),
)
def hasfl_fig8() -> Panels:
    return _by_resources({"uplink": "mbits_up", "servers": "mbits_servers"})


@experiment(
    against=_same_setting,
    figure=(Sweep(label="devices", x=lambda run: float(run.clients), series=_policy),),
)
def hasfl_fig9() -> Panels:
    runs = {
        f"{policy}-n{number}": run
        for number in NUMBERS
        for policy, run in policies(replace(CIFAR10, clients=number)).items()
    }
    return dealt(runs)


@experiment(figure=(BARS,))
def hasfl_fig10() -> Panels:
    fixed = {f"b{size}": BY_BATCH[f"b{size}"] for size in BATCHES[:3]}
    return dealt({"habs": with_plan(CIFAR10, "planned", "fixed"), **fixed})


@experiment(figure=(BARS,))
def hasfl_fig11() -> Panels:
    return dealt({"hams": with_plan(CIFAR10, "fixed", "planned"), **BY_CUT})
