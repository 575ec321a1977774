"""The tables of "The Impact of Cut Layer Selection in Split Federated Learning" (Dachille, Huang and Liu, 2025).

Each table has two recipes: as the paper states its settings, and as its authors' public code and result files show
that the printed numbers were obtained. The two differ in optimisers, schedules, networks, weights, orders and rounds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.data.augment import Augment
from cutlayer.recipes.compose import Panels, Runs, batched, cosine, drawn_by_torch, experiment, momentum_sgd, using
from cutlayer.runs.config import Choice, Run

IID = Choice("iid")
CROP_FLIP = Augment(crop=4, flip=True)
TURNED = Augment(flip=True, vertical_flip=True, rotate=10.0)
RESNET18 = drawn_by_torch("resnet18")
# The authors' ResNet-50 for small images: a 7x7 stem without pooling, and two hidden layers before the classes.
RESNET50 = drawn_by_torch("resnet50", stem="7x7", head=(256, 256))
# Their FedAvg trains another ResNet-18 than their split methods: the first stage strides too, and the head is deeper.
FEDAVG_RESNET18 = drawn_by_torch("resnet18", strides=(2, 2, 2, 2), head=(256, 256))
LAST_BLOCKS = {  # of the four stages
    "resnet18": ("layer1.1", "layer2.1", "layer3.1", "layer4.1"),
    "resnet50": ("layer1.2", "layer2.3", "layer3.5", "layer4.2"),
}


def _run(data: str, clients: int, rounds: int, model: Choice, augment: Augment = CROP_FLIP) -> Run:
    return Run(
        data=data,
        clients=clients,
        rounds=rounds,
        model=model,
        augment=augment,
        batching=Batching(size=64, epochs=5),
        checkpoint_every=10,
    )


HAM10000 = _run("ham10000", 100, 100, RESNET18, TURNED)
IMAGES = {
    "cifar10": _run("cifar10", 100, 200, RESNET18),
    "cifar100": _run("cifar100", 100, 300, RESNET50),
    "tiny": _run("tiny_imagenet", 10, 300, RESNET50),
}


def by_cut(run: Run) -> Runs:
    """Return the run cut after each stage of its network."""
    cuts = LAST_BLOCKS[run.model.name]
    return {f"{run.method.name}-cut{k}": replace(run, cut=cut) for k, cut in enumerate(cuts, start=1)}


def _dirichlet(alpha: float) -> Choice:
    return Choice("dirichlet", {"alpha": alpha, "min_size": 10, "balance_cap": True})


TABLE3 = {panel: replace(run, partition=IID) for panel, run in IMAGES.items()}
UNEVEN = {panel: replace(run, partition=_dirichlet(0.1)) for panel, run in IMAGES.items()}
TABLE4 = {"ham10000": replace(HAM10000, partition=IID), **UNEVEN}


# As the paper states it.


@experiment()
def cut_table3_as_paper() -> Panels:
    return {panel: _stated(run) for panel, run in TABLE3.items()}


@experiment()
def cut_table4_as_paper() -> Panels:
    return {panel: _stated(run) for panel, run in TABLE4.items()}


def _stated(run: Run) -> Runs:
    run = batched(run, drop_last=False)
    sgd = replace(run, optimiser=Choice("sgd", {"lr": 0.01}))
    adam = replace(run, optimiser=Choice("adam", {"lr": 0.001}))
    return {
        "fedavg": using(sgd, "fedavg"),
        "sfl_v1-sgd-cut1": by_cut(using(sgd, "sfl_v1"))["sfl_v1-cut1"],
        **by_cut(using(adam, "sfl_v1")),
        **by_cut(using(adam, "sfl_v2")),
    }


# As the authors ran it.


ADAM = Choice("adam", {"lr": 0.001, "weight_decay": 5e-4})
SGD, SLOW_SGD = momentum_sgd(0.01), momentum_sgd(0.001)
BOTH = {"fedavg": ADAM, "fedavg-sgd": SGD}


@experiment()
def cut_table3_as_run() -> Panels:
    cifar10 = replace(TABLE3["cifar10"], rounds=100)
    return {
        "cifar10": _made(cifar10, fedavg={"fedavg": SGD}, keep_last=("sfl_v1", "sfl_v2")),
        "cifar100": _made(TABLE3["cifar100"], fedavg=BOTH),
        "tiny": _made(TABLE3["tiny"], fedavg=BOTH, keep_last=("fedavg", "sfl_v1", "sfl_v2")),
    }


@experiment()
def cut_table4_as_run() -> Panels:
    tiny = replace(TABLE4["tiny"], partition=_dirichlet(0.01))
    return {
        "ham10000": _made(replace(TABLE4["ham10000"], rounds=300), fedavg=BOTH),
        "cifar10": _made(TABLE4["cifar10"], fedavg={"fedavg": SGD}, v1=SLOW_SGD),
        "cifar100": _made(TABLE4["cifar100"], fedavg=BOTH),
        "tiny": _made(tiny, fedavg={"fedavg": ADAM}),
    }


def _made(run: Run, *, fedavg: Mapping[str, Choice], v1: Choice = ADAM, keep_last: tuple[str, ...] = ()) -> Runs:
    """Return the runs of one column of a table as the authors' files show them.

    `fedavg` has the optimisers of FedAvg's runs by label. `v1` is the optimiser of SFL-V1, whose server keeps the
    learning rate constant. The methods in `keep_last` train on the last, smaller batch of a pass too.
    """

    def falling(optimiser: Choice) -> Choice:
        return Choice(optimiser.name, {**optimiser.options, "lr": cosine(optimiser.options["lr"], run.rounds)})

    def with_method(method: str, optimiser: Choice, server: Choice | None, **options: Any) -> Run:
        same = batched(run, drop_last=method not in keep_last)
        trained = replace(same, optimiser=falling(optimiser), server_optimiser=server)
        return using(trained, method, agg="uniform", **options)

    model = FEDAVG_RESNET18 if run.model == RESNET18 else run.model
    v2_order = {"interleave": "client", "order": "fixed"}
    return {
        **{label: replace(with_method("fedavg", opt, None), model=model) for label, opt in fedavg.items()},
        **by_cut(with_method("sfl_v1", v1, v1)),
        **by_cut(with_method("sfl_v2", ADAM, falling(SLOW_SGD), **v2_order)),
    }
