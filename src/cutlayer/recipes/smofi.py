"""What the SMoFi paper (arXiv 2511.09828) trains: its data sets, its methods, and the grid of the two."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cutlayer.batches import Batching
from cutlayer.config import Choice, Run
from cutlayer.recipes.compose import decayed, drawn_by_torch, trained, using, with_steps

MOMENTUM = 0.9
ALPHA = -0.1  # staleness factor
NAR_NORM = 10.0  # largest norm of FedNAR, the default of its authors' code

ON_PARTITIONS = "Partitions are drawn again until every client holds at least one batch."
ON_WEIGHTS = "The paper names no initial weights and has no public code: they are those that torch's layers draw."
ON_IMAGES = (
    ON_WEIGHTS,
    "The paper names no augmentation: none is used, as with crops and flips FedAvg soon passes its printed accuracy.",
    "ResNets have a 3x3 stem without pooling, for 32x32 and for 64x64 images.",
    "The cut after two residual blocks is stated for CIFAR-10 and assumed for the other data sets.",
    ON_PARTITIONS,
)
ON_METHODS = "FedNAR clips at a norm of 10, and SlowMo resets the local momenta every round; the paper gives neither."


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A data set of the paper: FedAvg's run on it, and what the other methods choose there."""

    run: Run
    steps: int  # for every client, of the methods that fix them
    fedavgm: float  # momentum between rounds
    slowmo: tuple[float, float] = (1.0, 0.6)  # step size and momentum between rounds
    beta: float  # global momentum of SMoFi
    mu: float = 0.0  # FedProx's penalty

    @property
    def batch(self) -> int:
        return self.run.batching.size


def _run(data: str, lr: float, weight_decay: float, batch: int, **settings: Any) -> Run:
    return Run(
        data=data,
        optimiser=Choice("sgd", {"lr": decayed(lr), "momentum": MOMENTUM, "weight_decay": weight_decay}),
        method=Choice("fedavg"),
        batching=Batching(size=batch, epochs=5),
        checkpoint_every=10,
        **settings,
    )


def dirichlet(alpha: float, min_size: int) -> Choice:
    """Uneven clients; each holds at least a batch, or it could not train."""
    return Choice("dirichlet", {"alpha": alpha, "min_size": min_size})


_RESNET18: dict[str, Any] = {"model": drawn_by_torch("resnet18"), "cut": "layer1.1", "clients": 100, "per_round": 20}

CIFAR10 = Setup(
    run=_run("cifar10", 0.05, 5e-4, 32, rounds=1000, partition=dirichlet(0.2, 32), **_RESNET18),
    steps=75,
    fedavgm=0.3,
    slowmo=(0.5, 0.4),
    beta=0.3,
    mu=0.01,
)
CIFAR100 = Setup(
    run=_run("cifar100", 0.05, 5e-4, 32, rounds=600, partition=dirichlet(0.2, 32), **_RESNET18),
    steps=75,
    fedavgm=0.5,
    beta=0.5,
    mu=0.01,
)
TINY = Setup(
    run=_run(
        "tiny_imagenet",
        0.05,
        1e-3,
        64,
        rounds=400,
        clients=200,
        per_round=40,
        partition=dirichlet(0.2, 64),
        model=drawn_by_torch("resnet34"),
        cut="layer1.1",
    ),
    steps=40,
    fedavgm=0.5,
    beta=0.5,
    mu=0.1,
)
SHAKESPEARE = Setup(
    run=_run(
        "shakespeare",
        0.01,
        5e-4,
        100,
        rounds=300,
        clients=100,
        per_round=20,
        partition=Choice("natural", {"min_size": 1000}),
        model=drawn_by_torch("char_transformer"),
        cut="layer2",
    ),
    steps=115,
    fedavgm=0.7,
    beta=0.5,
)
_SPEECH_RUN = _run(
    "speech_commands",
    0.01,
    5e-4,
    32,
    rounds=300,
    clients=200,
    per_round=20,
    partition=dirichlet(0.2, 32),
    model=drawn_by_torch("vgg11", norm="batch"),
    cut="conv2_1",
)
GOOGLE_SPEECH = Setup(
    # One epoch: the paper's 15 fixed steps are the mean of one, and all methods should do as much work.
    run=replace(_SPEECH_RUN, batching=replace(_SPEECH_RUN.batching, epochs=1)),
    steps=15,
    fedavgm=0.5,
    beta=0.5,
)

IMAGES: Mapping[str, Setup] = {"cifar10": CIFAR10, "cifar100": CIFAR100, "tiny": TINY}


def varied(setup: Setup, **changes: Any) -> Setup:
    """The setup with these keys of its run changed."""
    return replace(setup, run=replace(setup.run, **changes))


def smofi(setup: Setup, *, alpha: float = ALPHA, beta: float | None = None, **options: Any) -> Run:
    """SMoFi's run; beta is the setup's own by default."""
    return using(setup.run, "smofi", alpha=alpha, beta=setup.beta if beta is None else beta, **options)


def plug_ins(setup: Setup) -> dict[str, Run]:
    """FedAvg, and what can be added to it: the columns of the grid."""
    run, (step, slow_beta) = setup.run, setup.slowmo
    fixed = with_steps(run, setup.steps)
    return {
        "fedavg": run,
        "fedavgm": using(run, "fedavgm", beta=setup.fedavgm),
        "slowmo": using(fixed, "slowmo", alpha=step, beta=slow_beta),
        "fednag": using(fixed, "fednag"),
        "smofi": smofi(setup),
    }


BASES: Mapping[str, Callable[[Setup], dict[str, Any]]] = {  # by options of the optimiser
    "fedavg": lambda setup: {},
    "fedprox": lambda setup: {"proximal": setup.mu},
    "fednar": lambda setup: {"clip": NAR_NORM, "clip_scope": "joint", "clip_decay": True},
}


def grid(setup: Setup, bases: tuple[str, ...] = ("fedavg",)) -> dict[str, Run]:
    """Every base with every plug-in, by label."""
    return {
        grid_label(base, plug_in): trained(run, **BASES[base](setup), **_nesterov(plug_in))
        for base in bases
        for plug_in, run in plug_ins(setup).items()
    }


def grid_label(base: str, plug_in: str) -> str:
    """fedavg and smofi: smofi; fedprox and fedavg: fedprox; fedprox and smofi: fedprox+smofi."""
    if base == "fedavg":
        return plug_in
    return base if plug_in == "fedavg" else f"{base}+{plug_in}"


def _nesterov(plug_in: str) -> dict[str, Any]:
    return {"nesterov": True} if plug_in == "fednag" else {}
