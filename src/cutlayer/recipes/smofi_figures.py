"""The figures of the SMoFi paper that show results; it prints no numbers for them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from cutlayer.config import Choice, Run
from cutlayer.recipes.compose import decayed, drawn_by_torch, label, named, trained, using
from cutlayer.recipes.recipe import Apart, Recipe, Sweep
from cutlayer.recipes.smofi import (
    ALPHA,
    CIFAR10,
    CIFAR100,
    IMAGES,
    ON_IMAGES,
    TINY,
    Setup,
    dirichlet,
    grid,
    plug_ins,
    smofi,
    varied,
)

ALPHAS = (-0.01, -0.1, -1.0, -10.0)
BLOCKS = range(9)  # residual blocks of ResNet-18 at the client
DEFAULT_BLOCKS = 2
BLOCK_RANGES = ((0, 3), (4, 7), (8, 13), (14, 16))  # of ResNet-34, a number drawn each round
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5)
TARGETS = {"cifar10": 0.70, "cifar100": 0.43, "tiny": 0.30}


def smofi_figure1() -> Recipe:
    """SMoFi, Figure 1: what momentum in the local optimisers does to FedAvg on uneven data."""
    name = "smofi_figure1"
    return Recipe(
        runs=named(name, {f"cifar10-dir{alpha:g}": _momentum_or_not(alpha) for alpha in (0.5, 0.2)}),
        source="SMoFi, Figure 1",
        claims=(
            "Momentum improves the final accuracy on moderately and on extremely uneven data, but slows down learning.",
            "The slowing down is stronger the more uneven the data are.",
        ),
        notes=(
            "The paper names neither the data nor what is moderate and extreme: CIFAR-10 with Dir(0.5) and Dir(0.2).",
            *ON_IMAGES,
        ),
    )


def _momentum_or_not(alpha: float) -> dict[str, Run]:
    run = replace(CIFAR10.run, partition=dirichlet(alpha, CIFAR10.batch))
    return {"fedavg": run, "fedavg-no-momentum": trained(run, momentum=0.0)}


def smofi_figure3() -> Recipe:
    """SMoFi, Figure 3: staleness factors and cuts on CIFAR-10."""
    name = "smofi_figure3"
    return Recipe(
        runs=named(name, {"cifar10": {**_by_alpha(CIFAR10), **_by_cut(CIFAR10)}}),
        source="SMoFi, Figure 3",
        claims=(
            "A staleness factor of -1 converges faster than -0.1 but ends lower.",
            "SMoFi beats FedAvg at every cut, by more the fewer blocks the clients hold.",
        ),
        notes=(ALPHAS_NOTE, DEFAULT_NOTE, *ON_IMAGES),
        figure=SETTINGS,
    )


def smofi_figure9() -> Recipe:
    """SMoFi, Figure 9: staleness factors and cuts on CIFAR-100 and Tiny-ImageNet."""
    name = "smofi_figure9"
    panels = {
        "cifar100": {**_by_alpha(CIFAR100), **_by_cut(CIFAR100)},
        "tiny": {**_by_alpha(TINY), **_by_random_cut(TINY)},
    }
    return Recipe(
        runs=named(name, panels),
        source="SMoFi, Figure 9",
        claims=(
            "CIFAR-100: a smaller staleness factor slows down convergence and gains a little accuracy.",
            "Tiny-ImageNet: a larger staleness factor gains accuracy and hardly changes the speed.",
            "SMoFi beats FedAvg even with only the output block at the server; small cuts gain more.",
        ),
        notes=(ALPHAS_NOTE, DEFAULT_NOTE, RANGES_NOTE, *ON_IMAGES),
        figure=SETTINGS,
    )


ALPHAS_NOTE = "The paper names the staleness factors -0.01, -0.1, -1 and -10, and no others in between."
DEFAULT_NOTE = "The run smofi has the staleness factor -0.1 and the cut after two blocks: it belongs to both sweeps."
RANGES_NOTE = (
    "On Tiny-ImageNet every round draws its cut, so the run smofi, whose cut stays, is in the first sweep only."
)


def _by_alpha(setup: Setup) -> dict[str, Run]:
    swept = {f"smofi-alpha{alpha:g}": smofi(setup, alpha=alpha) for alpha in ALPHAS if alpha != ALPHA}
    return {"fedavg": setup.run, "smofi": smofi(setup), **swept}


def _by_cut(setup: Setup) -> dict[str, Run]:
    """A client holds the stem and so many blocks; two is the default."""
    return {f"smofi-cut{k}": replace(smofi(setup), cut=1 + k) for k in BLOCKS if k != DEFAULT_BLOCKS}


def _by_random_cut(setup: Setup) -> dict[str, Run]:
    return {f"smofi-cut{low}-{high}": smofi(setup, random_cut=(1 + low, 1 + high)) for low, high in BLOCK_RANGES}


def _alpha(run: Run) -> float | str | Apart:
    return _setting(run, "alpha", default=ALPHA)


def _blocks(run: Run) -> float | str | Apart:
    return _setting(run, "cut", default=Apart.ABSENT if run.data == TINY.run.data else DEFAULT_BLOCKS)


def _setting(run: Run, word: str, default: float | Apart) -> float | str | Apart:
    """What a label such as smofi-alpha-0.01, smofi-cut5 or smofi-cut4-7 says after the word; smofi has the default."""
    method, _, setting = label(run).partition("-")
    if method == "fedavg":
        return Apart.LEVEL
    if not setting:
        return default
    if not setting.startswith(word):
        return Apart.ABSENT
    value = setting.removeprefix(word)
    return value if "-" in value[1:] else float(value)


SETTINGS = (
    Sweep(label="staleness factor", x=_alpha, series=lambda run: run.method.name, log=True),
    Sweep(label="residual blocks at the client", x=_blocks, series=lambda run: run.method.name),
)


def smofi_figure4() -> Recipe:
    """SMoFi, Figure 4: four local optimisers on CIFAR-100."""
    name = "smofi_figure4"
    adam: dict[str, Any] = {"lr": decayed(1e-3), "weight_decay": 0.0}
    sgdm = CIFAR100.run.optimiser
    optimisers = {
        "sgdm": sgdm,
        "nag": Choice("sgd", {**sgdm.options, "nesterov": True}),
        "adam": Choice("adam", adam),
        "adamw": Choice("adamw", adam),
    }
    return Recipe(
        runs=named(name, {panel: plug_ins(varied(CIFAR100, optimiser=opt)) for panel, opt in optimisers.items()}),
        source="SMoFi, Figure 4",
        claims=("SMoFi beats FedAvg, FedAvgM, SlowMo and FedNAG with each of the four optimisers.",),
        notes=(
            "FedNAG averages the moments of the panel's own optimiser: both of Adam's, and plain momentum for SGDM.",
            "Adam's learning rate falls by 0.998 a round, as that of SGD.",
            *ON_IMAGES,
        ),
    )


class Network(NamedTuple):
    """A model of Figure 5, and how it is trained."""

    model: Choice
    cut: str
    lr: float
    weight_decay: float


NETWORKS: Mapping[str, Network] = {
    "vgg11": Network(drawn_by_torch("vgg11", norm="batch"), "conv2_1", 0.01, 5e-4),
    "vgg16": Network(drawn_by_torch("vgg16", norm="batch"), "conv2_2", 0.01, 5e-4),
    "mobilenet_v2": Network(drawn_by_torch("mobilenet_v2"), "block4", 0.01, 5e-4),
    "resnet18": Network(drawn_by_torch("resnet18"), "layer1.1", 0.05, 5e-4),
    "resnet34": Network(drawn_by_torch("resnet34"), "layer1.1", 0.05, 1e-3),
    "densenet121": Network(drawn_by_torch("densenet121"), "transition1", 0.05, 1e-3),
    "densenet169": Network(drawn_by_torch("densenet169"), "transition1", 0.05, 1e-3),
}


def smofi_figure5() -> Recipe:
    """SMoFi, Figures 5 and 8: seven models on Tiny-ImageNet, 150 rounds."""
    name = "smofi_figure5"
    return Recipe(
        runs=named(name, {model: grid(_on_tiny(network)) for model, network in NETWORKS.items()}),
        source="SMoFi, Figures 5 and 8",
        claims=(
            "SMoFi gains accuracy and needs fewer rounds with each of the seven models.",
            "It gains most with deep models such as DenseNet-121 and DenseNet-169.",
        ),
        notes=(
            "The target is the whole accuracy of FedAvg with the same model. Figure 8 shows the curves of these runs.",
            "The paper lists six models and speaks of seven; ResNet-34 is taken as the seventh.",
            "Cuts are chosen: after the second block of convolutions (VGG, with batch normalisation), the fourth "
            "inverted residual (MobileNetV2), the first transition (DenseNet), two residual blocks (ResNet).",
            *ON_IMAGES,
        ),
        share=1.0,
    )


def _on_tiny(network: Network) -> Setup:
    setup = varied(TINY, model=network.model, cut=network.cut, rounds=150)
    run = trained(setup.run, lr=decayed(network.lr), weight_decay=network.weight_decay)
    return replace(setup, run=run)


def smofi_figure10() -> Recipe:
    """SMoFi, Figure 10: the global momentum of SMoFi and of FedAvgM."""
    name = "smofi_figure10"
    panels = {
        panel: {
            **{f"smofi-beta{beta:g}": smofi(setup, beta=beta) for beta in BETAS},
            **{f"fedavgm-beta{beta:g}": using(setup.run, "fedavgm", beta=beta) for beta in BETAS},
        }
        for panel, setup in IMAGES.items()
    }
    return Recipe(
        runs=named(name, panels),
        source="SMoFi, Figure 10",
        claims=(
            "SMoFi beats FedAvgM in accuracy and in rounds for every global momentum.",
            "A larger global momentum is better on CIFAR-100 and Tiny-ImageNet.",
        ),
        notes=("The paper states the range 0.1 to 0.5; steps of 0.1 are chosen here.", *ON_IMAGES),
        targets={f"{name}/{panel}": target for panel, target in TARGETS.items()},
        figure=(
            Sweep(
                label="global momentum",
                x=lambda run: float(run.method.options["beta"]),
                series=lambda run: run.method.name,
            ),
        ),
    )


def smofi_figure11() -> Recipe:
    """SMoFi, Figure 11: SMoFi without its global momentum, and without the alignment of momenta."""
    name = "smofi_figure11"
    panels = {
        panel: {
            "fedavg": setup.run,
            "smofi": smofi(setup),
            "smofi-no-global": smofi(setup, beta=0.0),
            "smofi-no-align": smofi(setup, align=False),
        }
        for panel, setup in IMAGES.items()
    }
    return Recipe(
        runs=named(name, panels),
        source="SMoFi, Figure 11",
        claims=(
            "The alignment is the main gain, and grows from CIFAR-10 to CIFAR-100 to Tiny-ImageNet.",
            "The global momentum adds to it, most on Tiny-ImageNet.",
        ),
        notes=("FedAvg is run because its accuracy sets the target.", *ON_IMAGES),
    )
