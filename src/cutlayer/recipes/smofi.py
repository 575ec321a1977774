"""The SMoFi paper (arXiv 2511.09828): its data sets, its methods, the grid of the two, its tables and figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.recipes.compose import (
    SMALL,
    Panels,
    Runs,
    batched,
    decayed,
    dirichlet,
    drawn_by_torch,
    experiment,
    label,
    momentum_sgd,
    trained,
    using,
)
from cutlayer.recipes.recipe import Apart, Sweep
from cutlayer.runs.config import Choice, Run

ALPHA = -0.1  # staleness factor
NAR_NORM = 10.0  # largest norm of FedNAR, the default of its authors' code


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A data set of the paper: FedAvg's run on it, and the hyper-parameters of the other methods."""

    run: Run
    steps: int  # of every client in a round, for methods that fix them
    fedavgm: float = 0.5  # momentum between rounds
    slowmo: tuple[float, float] = (1.0, 0.6)  # step size and momentum between rounds
    beta: float = 0.5  # global momentum of SMoFi
    mu: float = 0.0  # FedProx's penalty


def _run(data: str, lr: float, weight_decay: float, batch: int, epochs: int = 5, **settings: Any) -> Run:
    return Run(
        data=data,
        optimiser=momentum_sgd(decayed(lr), weight_decay),
        method=Choice("fedavg"),
        batching=Batching(size=batch, epochs=epochs),
        checkpoint_every=10,
        **{"per_round": 20, "partition": dirichlet(0.2, batch), **settings},
    )


_RESNET18: dict[str, Any] = {"model": drawn_by_torch("resnet18"), "cut": "layer1.1", "clients": 100}
_RESNET34: dict[str, Any] = {
    "model": drawn_by_torch("resnet34"),
    "cut": "layer1.1",
    "clients": 200,
    "per_round": 40,
}
_CIFAR10_RUN = _run("cifar10", 0.05, 5e-4, 32, rounds=1000, **_RESNET18)
_CIFAR100_RUN = _run("cifar100", 0.05, 5e-4, 32, rounds=600, **_RESNET18)
_TINY_RUN = _run("tiny_imagenet", 0.05, 1e-3, 64, rounds=400, **_RESNET34)
_SHAKESPEARE_RUN = _run(
    "shakespeare",
    0.01,
    5e-4,
    100,
    rounds=300,
    clients=100,
    partition=Choice("natural", {"min_size": 1000}),
    model=drawn_by_torch("char_transformer"),
    cut="layer2",
)
_SPEECH_RUN = _run(
    "speech_commands",
    0.01,
    5e-4,
    32,
    epochs=1,  # in which the mean client takes the 15 steps that the paper fixes: all methods do the same work
    rounds=300,
    clients=200,
    model=drawn_by_torch("vgg11", norm="batch"),
    cut="conv2_1",
)
CIFAR10 = Setup(run=_CIFAR10_RUN, steps=75, fedavgm=0.3, slowmo=(0.5, 0.4), beta=0.3, mu=0.01)
CIFAR100 = Setup(run=_CIFAR100_RUN, steps=75, mu=0.01)
TINY = Setup(run=_TINY_RUN, steps=40, mu=0.1)
SHAKESPEARE = Setup(run=_SHAKESPEARE_RUN, steps=115, fedavgm=0.7)
GOOGLE_SPEECH = Setup(run=_SPEECH_RUN, steps=15)

IMAGES: Mapping[str, Setup] = {"cifar10": CIFAR10, "cifar100": CIFAR100, "tiny": TINY}


def varied(setup: Setup, **changes: Any) -> Setup:
    """Return the setup with these keys of its run changed."""
    return replace(setup, run=replace(setup.run, **changes))


def on_images(runs: Callable[[Setup], Runs]) -> Panels:
    """Return these runs for each of the three image sets."""
    return {panel: runs(setup) for panel, setup in IMAGES.items()}


def smofi(setup: Setup, **options: Any) -> Run:
    """Return SMoFi's run, by default with the setup's global momentum."""
    return using(setup.run, "smofi", **{"alpha": ALPHA, "beta": setup.beta, **options})


def plug_ins(setup: Setup) -> Runs:
    """Return FedAvg, and FedAvg with each of the momentum methods: the columns of the grid."""
    run, (step, slow_beta) = setup.run, setup.slowmo
    fixed = batched(run, steps=setup.steps)
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


def grid(setup: Setup, bases: tuple[str, ...] = ("fedavg",)) -> Runs:
    """Return every base with every plug-in, by label."""
    return {
        grid_label(base, plug_in): trained(run, **BASES[base](setup), **_nesterov(plug_in))
        for base in bases
        for plug_in, run in plug_ins(setup).items()
    }


def grid_label(base: str, plug_in: str) -> str:
    """Name a cell: smofi for fedavg and smofi, fedprox for fedprox and fedavg, fedprox+smofi for fedprox and smofi."""
    if base == "fedavg":
        return plug_in
    return base if plug_in == "fedavg" else f"{base}+{plug_in}"


def _base(grid_label: str) -> str:
    first = grid_label.partition("+")[0]
    return first if first in BASES else "fedavg"


def _nesterov(plug_in: str) -> dict[str, Any]:
    return {"nesterov": True} if plug_in == "fednag" else {}


# An experiment of our own, for a small machine.

SAMPLES, CLIENTS, BATCH = 60_000, 50, 32
EPOCHS = 2
MEAN_STEPS = EPOCHS * SAMPLES // CLIENTS // BATCH  # of a client in a round
LR = 0.02  # for all methods; at 0.05 SFL-V2 collapses

FASHION_MNIST = replace(
    SMALL,
    clients=CLIENTS,
    per_round=10,
    partition=dirichlet(0.2, BATCH),
    method=Choice("fedavg"),
    optimiser=momentum_sgd(decayed(LR)),
    batching=Batching(size=BATCH, epochs=EPOCHS),
    rounds=60,
    devices=Choice("pool", {"model_sync": True}),
    engine="loop",  # the same on every machine
    cpu_threads=1,
    checkpoint_every=5,
)


@experiment()
def smofi_fashion_mnist() -> Panels:
    setup = replace(CIFAR10, run=FASHION_MNIST, steps=MEAN_STEPS)
    return {"": {word: run for word, run in grid(setup).items() if word != "smofi"} | _split_methods(setup)}


# The tables; Figure 7 shows the curves of the first.

POOL = Choice("pool", {"kappa": 100.0})  # a server a hundred times as fast as the mean client
PARTICIPANTS = (10, 20, 30)


@experiment(against=_base)
def smofi_table1() -> Panels:
    return on_images(lambda setup: grid(setup, tuple(BASES)))


@experiment()
def smofi_table2() -> Panels:
    return on_images(lambda setup: _split_methods(varied(setup, devices=POOL)))


def _split_methods(setup: Setup) -> Runs:
    return {
        "fedavg": setup.run,
        "sfl_v1-step": using(setup.run, "sfl_v1", sync="step"),
        "sfl_v1-epoch": using(setup.run, "sfl_v1", sync="epoch"),
        "sfl_v2": using(setup.run, "sfl_v2"),
        "mergesfl": using(batched(setup.run, steps=setup.steps), "mergesfl", regulate=True),
        "smofi": smofi(setup),
    }


@experiment()
def smofi_table3() -> Panels:
    dir05 = {
        f"{panel}-dir05": grid(varied(setup, partition=dirichlet(0.5, setup.run.batching.size)))
        for panel, setup in IMAGES.items()
    }
    return dir05 | {f"{panel}-iid": grid(varied(setup, partition=Choice("iid"))) for panel, setup in IMAGES.items()}


@experiment()
def smofi_table4() -> Panels:
    return {f"tiny-j{count}": grid(varied(TINY, per_round=count)) for count in PARTICIPANTS}


@experiment()
def smofi_table5() -> Panels:
    return {"shakespeare": grid(SHAKESPEARE), "google_speech": grid(GOOGLE_SPEECH)}


# The figures that show results, without numbers.

ALPHAS = (-0.01, -0.1, -1.0, -10.0)
BLOCKS = range(9)  # residual blocks of ResNet-18 at the client
DEFAULT_BLOCKS = 2
BLOCK_RANGES = ((0, 3), (4, 7), (8, 13), (14, 16))  # of ResNet-34; each round draws a number
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5)


@experiment()
def smofi_fig1() -> Panels:
    return {f"cifar10-dir{alpha:g}": _momentum_or_not(alpha) for alpha in (0.5, 0.2)}


def _momentum_or_not(alpha: float) -> Runs:
    run = replace(CIFAR10.run, partition=dirichlet(alpha, CIFAR10.run.batching.size))
    return {"fedavg": run, "fedavg-no-momentum": trained(run, momentum=0.0)}


def _setting(run: Run, word: str, default: float | Apart) -> float | str | Apart:
    """Return the value after the word in a label such as smofi-alpha-0.01 or smofi-cut4-7; smofi has the default."""
    method, _, setting = label(run).partition("-")
    if method == "fedavg":
        return Apart.LEVEL
    if not setting:
        return default
    if not setting.startswith(word):
        return Apart.ABSENT
    value = setting.removeprefix(word)
    return value if "-" in value[1:] else float(value)


def _alpha(run: Run) -> float | str | Apart:
    return _setting(run, "alpha", default=ALPHA)


def _blocks(run: Run) -> float | str | Apart:
    return _setting(run, "cut", default=Apart.ABSENT if run.data == TINY.run.data else DEFAULT_BLOCKS)


SETTINGS = (
    Sweep(label="staleness factor", x=_alpha, log=True),
    Sweep(label="residual blocks at the client", x=_blocks),
)


def _by_alpha(setup: Setup) -> Runs:
    swept = {f"smofi-alpha{alpha:g}": smofi(setup, alpha=alpha) for alpha in ALPHAS if alpha != ALPHA}
    return {"fedavg": setup.run, "smofi": smofi(setup), **swept}


def _by_cut(setup: Setup) -> Runs:
    """Return runs whose clients hold the stem and this many blocks; the default of two is left out."""
    return {f"smofi-cut{k}": replace(smofi(setup), cut=1 + k) for k in BLOCKS if k != DEFAULT_BLOCKS}


def _by_random_cut(setup: Setup) -> Runs:
    return {f"smofi-cut{low}-{high}": smofi(setup, random_cut=(1 + low, 1 + high)) for low, high in BLOCK_RANGES}


@experiment(figure=SETTINGS)
def smofi_fig3() -> Panels:
    return {"cifar10": _by_alpha(CIFAR10) | _by_cut(CIFAR10)}


@experiment(figure=SETTINGS)
def smofi_fig9() -> Panels:
    return {"cifar100": _by_alpha(CIFAR100) | _by_cut(CIFAR100), "tiny": _by_alpha(TINY) | _by_random_cut(TINY)}


@experiment()
def smofi_fig4() -> Panels:
    adam: dict[str, Any] = {"lr": decayed(1e-3), "weight_decay": 0.0}
    sgdm = CIFAR100.run.optimiser
    optimisers = {
        "sgdm": sgdm,
        "nag": Choice("sgd", {**sgdm.options, "nesterov": True}),
        "adam": Choice("adam", adam),
        "adamw": Choice("adamw", adam),
    }
    return {panel: plug_ins(varied(CIFAR100, optimiser=optimiser)) for panel, optimiser in optimisers.items()}


@experiment()
def smofi_fig5() -> Panels:
    return {
        "vgg11": _on_tiny("vgg11", "conv2_1", 0.01, 5e-4, norm="batch"),
        "vgg16": _on_tiny("vgg16", "conv2_2", 0.01, 5e-4, norm="batch"),
        "mobilenet_v2": _on_tiny("mobilenet_v2", "block4", 0.01, 5e-4),
        "resnet18": _on_tiny("resnet18", "layer1.1", 0.05, 5e-4),
        "resnet34": _on_tiny("resnet34", "layer1.1", 0.05, 1e-3),
        "densenet121": _on_tiny("densenet121", "transition1", 0.05, 1e-3),
        "densenet169": _on_tiny("densenet169", "transition1", 0.05, 1e-3),
    }


def _on_tiny(model: str, cut: str, lr: float, weight_decay: float, **options: Any) -> Runs:
    optimiser = momentum_sgd(decayed(lr), weight_decay)
    return grid(varied(TINY, model=drawn_by_torch(model, **options), cut=cut, rounds=150, optimiser=optimiser))


@experiment(figure=(Sweep(label="global momentum", x=lambda run: float(run.method.options["beta"])),))
def smofi_fig10() -> Panels:
    return on_images(_by_beta)


def _by_beta(setup: Setup) -> Runs:
    ours = {f"smofi-beta{beta:g}": smofi(setup, beta=beta) for beta in BETAS}
    return ours | {f"fedavgm-beta{beta:g}": using(setup.run, "fedavgm", beta=beta) for beta in BETAS}


@experiment()
def smofi_fig11() -> Panels:
    return on_images(_ablated)


def _ablated(setup: Setup) -> Runs:
    return {
        "fedavg": setup.run,
        "smofi": smofi(setup),
        "smofi-no-global": smofi(setup, beta=0.0),
        "smofi-no-align": smofi(setup, align=False),
    }
