"""The tables of "The Impact of Cut Layer Selection in Split Federated Learning" (Dachille, Huang and Liu, 2025).

Each table has two recipes: as the paper states its settings, and as its authors' public code and result files show
that the printed numbers were made. The two differ in optimisers, schedules, networks, weights, orders and rounds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.data.augment import Augment
from cutlayer.recipes import published
from cutlayer.recipes.compose import cosine, drawn_by_torch, named, using
from cutlayer.recipes.published import PaperTable
from cutlayer.recipes.recipe import Published, Recipe, experiment
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
WEIGHT_DECAY = 5e-4


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
CIFAR10 = _run("cifar10", 100, 200, RESNET18)
CIFAR100 = _run("cifar100", 100, 300, RESNET50)
TINY = _run("tiny_imagenet", 10, 300, RESNET50)


def by_cut(run: Run, method: str) -> dict[str, Run]:
    """The run cut after each stage of its network."""
    cuts = LAST_BLOCKS[run.model.name]
    return {f"{method}-cut{k}": replace(run, cut=cut) for k, cut in enumerate(cuts, start=1)}


def _dirichlet(alpha: float) -> Choice:
    return Choice("dirichlet", {"alpha": alpha, "min_size": 10, "balance_cap": True})


def _dealt(runs: Mapping[str, Run], partition: Choice) -> dict[str, Run]:
    return {panel: replace(run, partition=partition) for panel, run in runs.items()}


IMAGES = {"cifar10": CIFAR10, "cifar100": CIFAR100, "tiny": TINY}
TABLE3 = _dealt(IMAGES, IID)
TABLE4 = {"ham10000": replace(HAM10000, partition=IID), **_dealt(IMAGES, _dirichlet(0.1))}


# As the paper states it.

AS_PAPER_NOTES = (
    "As the paper states it: SGD at 0.01 for FedAvg, Adam at 0.001 for SFL, means weighted by samples, a random order "
    "of clients at every step of SFL-V2, last batches kept. No momentum, weight decay or schedule is stated; none is "
    "used.",
    "Augmentation, ResNet-50's stem and head, initial weights (torch's own) and the balanced Dirichlet draw are not "
    "stated; they are those of the authors' code.",
    "sfl_v1-sgd-cut1 is not in the paper: SFL-V1 with FedAvg's optimiser is FedAvg, whatever the cut.",
)


@experiment("The Impact of Cut Layer Selection, Table 3")
def cut_table3_as_paper(name: str) -> Recipe:
    """Cut layers, Table 3 as stated: IID data."""
    return _as_paper(name, published.CUT_TABLE3, TABLE3)


@experiment("The Impact of Cut Layer Selection, Table 4")
def cut_table4_as_paper(name: str) -> Recipe:
    """Cut layers, Table 4 as stated: Dir(0.1), and HAM10000 with its own uneven classes."""
    note = "HAM10000 is dealt at random: the paper leaves it as it is, because its classes are uneven by themselves."
    return _as_paper(name, published.CUT_TABLE4, TABLE4, note)


def _as_paper(name: str, table: PaperTable, panels: Mapping[str, Run], *notes: str) -> Recipe:
    return Recipe(
        runs=named(name, {panel: _stated(run) for panel, run in panels.items()}),
        published=table.by_run(name),
        claims=CLAIMS,
        notes=(*AS_PAPER_NOTES, *notes),
    )


def _stated(run: Run) -> dict[str, Run]:
    run = replace(run, batching=replace(run.batching, drop_last=False))
    sgd = replace(run, optimiser=Choice("sgd", {"lr": 0.01}))
    adam = replace(run, optimiser=Choice("adam", {"lr": 0.001}))
    return {
        "fedavg": using(sgd, "fedavg"),
        "sfl_v1-sgd-cut1": by_cut(using(sgd, "sfl_v1"), "sfl_v1")["sfl_v1-cut1"],
        **by_cut(using(adam, "sfl_v1"), "sfl_v1"),
        **by_cut(using(adam, "sfl_v2"), "sfl_v2"),
    }


# As the authors ran it.


@dataclass(frozen=True, kw_only=True)
class AsRun:
    """What the authors' files show for one column of a table."""

    run: Run
    fedavg: Choice
    v1: Choice  # of the clients; the server's has the same at a constant learning rate
    keep_last: tuple[str, ...] = ()  # methods that do not leave out the last, smaller batch of a pass
    fedavg_sgd: bool = False  # whether FedAvg is run with SGD as well


def _sgd(lr: float, rounds: int) -> Choice:
    return Choice("sgd", {"lr": cosine(lr, rounds), "momentum": 0.9, "weight_decay": WEIGHT_DECAY})


def _adam(rounds: int) -> Choice:
    return Choice("adam", {"lr": cosine(0.001, rounds), "weight_decay": WEIGHT_DECAY})


def _at_constant_rate(optimiser: Choice) -> Choice:
    return Choice(optimiser.name, {**optimiser.options, "lr": optimiser.options["lr"]["lr"]})


ALL = ("fedavg", "sfl_v1", "sfl_v2")
AS_RUN_TABLE3 = {
    "cifar10": AsRun(
        run=replace(TABLE3["cifar10"], rounds=100),
        fedavg=_sgd(0.01, 100),
        v1=_adam(100),
        keep_last=("sfl_v1", "sfl_v2"),
    ),
    "cifar100": AsRun(run=TABLE3["cifar100"], fedavg=_adam(300), v1=_adam(300), fedavg_sgd=True),
    "tiny": AsRun(run=TABLE3["tiny"], fedavg=_adam(300), v1=_adam(300), keep_last=ALL, fedavg_sgd=True),
}
AS_RUN_TABLE4 = {
    "ham10000": AsRun(run=replace(TABLE4["ham10000"], rounds=300), fedavg=_adam(300), v1=_adam(300), fedavg_sgd=True),
    "cifar10": AsRun(run=TABLE4["cifar10"], fedavg=_sgd(0.01, 200), v1=_sgd(0.001, 200)),
    "cifar100": AsRun(run=TABLE4["cifar100"], fedavg=_adam(300), v1=_adam(300), fedavg_sgd=True),
    "tiny": AsRun(run=replace(TABLE4["tiny"], partition=_dirichlet(0.01)), fedavg=_adam(300), v1=_adam(300)),
}
AS_RUN_NOTES = (
    "As the authors' code and result files show: unweighted means; cosine schedules over the rounds, except at the "
    "server of SFL-V1; weight decay 5e-4; momentum 0.9 in every SGD; SFL-V2 client by client in a fixed order, its "
    "server always SGD at 0.001 with one persistent momentum; another ResNet-18 for FedAvg; initial weights that torch "
    "draws. Seeds were 1, 12 and 123.",
    "No result file is public for CIFAR-100; it is run as Tiny-ImageNet, and FedAvg with SGD as well.",
)


@experiment("The Impact of Cut Layer Selection, Table 3")
def cut_table3_as_run(name: str) -> Recipe:
    """Cut layers, Table 3 as its numbers were made: IID data."""
    notes = (
        "CIFAR-10 has 100 rounds after a remark in the authors' code; the paper says 200. No result file is public.",
        "fedavg-sgd on Tiny-ImageNet is in the result files and not in the paper: it beats every split run.",
    )
    return _as_run(name, published.CUT_TABLE3, AS_RUN_TABLE3, notes)


@experiment("The Impact of Cut Layer Selection, Table 4")
def cut_table4_as_run(name: str) -> Recipe:
    """Cut layers, Table 4 as its numbers were made: Dir(0.1), Dir(0.01) for Tiny-ImageNet, HAM10000 at random."""
    notes = (
        "HAM10000 has 300 rounds (the paper says 100) and Tiny-ImageNet Dir(0.01) (the paper says 0.1).",
        "SFL-V1 trains CIFAR-10 with SGD at 0.001 (the paper says Adam).",
        "fedavg-sgd on HAM10000 is in the result files and not in the paper. Three such runs on uneven Tiny-ImageNet, "
        "54.34, 53.41 and 53.11 %, were removed from the files.",
    )
    return _as_run(name, published.CUT_TABLE4, AS_RUN_TABLE4, notes)


def _as_run(name: str, table: PaperTable, panels: Mapping[str, AsRun], notes: tuple[str, ...]) -> Recipe:
    runs = named(name, {panel: _made(column) for panel, column in panels.items()})
    left_out: Mapping[str, Published] = {
        run.name: published.CUT_LEFT_OUT[run.name] for run in runs if run.name in published.CUT_LEFT_OUT
    }
    return Recipe(
        runs=runs,
        published={**table.by_run(name), **left_out},
        claims=CLAIMS,
        notes=(*AS_RUN_NOTES, *notes),
    )


def _made(column: AsRun) -> dict[str, Run]:
    rounds = column.run.rounds
    fedavg = {"fedavg": _fedavg(column, column.fedavg)}
    if column.fedavg_sgd:
        fedavg["fedavg-sgd"] = _fedavg(column, _sgd(0.01, rounds))
    v1 = _like(column, "sfl_v1", optimiser=column.v1, server_optimiser=_at_constant_rate(column.v1))
    v2 = _like(column, "sfl_v2", optimiser=_adam(rounds), server_optimiser=_sgd(0.001, rounds))
    return {
        **fedavg,
        **by_cut(using(v1, "sfl_v1", agg="uniform"), "sfl_v1"),
        **by_cut(using(v2, "sfl_v2", agg="uniform", interleave="client", order="fixed"), "sfl_v2"),
    }


def _fedavg(column: AsRun, optimiser: Choice) -> Run:
    model = FEDAVG_RESNET18 if column.run.model == RESNET18 else column.run.model
    return using(_like(column, "fedavg", model=model, optimiser=optimiser), "fedavg", agg="uniform")


def _like(column: AsRun, method: str, **changes: Any) -> Run:
    batching = replace(column.run.batching, drop_last=method not in column.keep_last)
    return replace(column.run, batching=batching, **changes)


CLAIMS = (
    "SFL-V1 hardly depends on the cut: 0.4 points between cuts on IID CIFAR-10, 1.87 on uneven CIFAR-10.",
    "SFL-V2 depends on it, and is best at the first cut on three of four uneven data sets.",
    "SFL-V2 at the first cut beats FedAvg, by 7.05 points on IID CIFAR-10 and 9.78 on uneven CIFAR-100.",
)
