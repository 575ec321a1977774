"""The SMoFi paper (arXiv 2511.09828): its data sets, its methods, the grid of the two, its tables and figures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cutlayer.core.batches import Batching
from cutlayer.recipes import published
from cutlayer.recipes.compose import decayed, drawn_by_torch, label, named, trained, using, with_steps
from cutlayer.recipes.recipe import OURS, Apart, Recipe, Sweep, experiment
from cutlayer.runs.config import Choice, Run

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


# An experiment of our own, for a small machine.

SAMPLES, CLIENTS, BATCH = 60_000, 50, 32
EPOCHS = 2
MEAN_STEPS = EPOCHS * SAMPLES // CLIENTS // BATCH  # of a client in a round
LR = 0.02  # for all methods; at 0.05 SFL-V2 collapses

FASHION_MNIST = Run(
    data="fashion_mnist",
    clients=CLIENTS,
    per_round=10,
    partition=Choice("dirichlet", {"alpha": 0.2, "min_size": BATCH}),
    model=Choice("cnn", {"width": 16}),
    cut="conv1",
    method=Choice("fedavg"),
    optimiser=Choice("sgd", {"lr": decayed(LR), "momentum": 0.9, "weight_decay": 5e-4}),
    batching=Batching(size=BATCH, epochs=EPOCHS),
    rounds=60,
    devices=Choice("pool", {"model_sync": True}),
    engine="loop",  # so that every machine takes the same one
    cpu_threads=1,
    checkpoint_every=5,
)


@experiment(OURS)
def smofi_fashion_mnist(name: str) -> Recipe:
    """Fashion-MNIST, Dirichlet 0.2: the methods of the SMoFi paper side by side on a small machine."""
    setup = replace(CIFAR10, run=FASHION_MNIST, steps=MEAN_STEPS)
    runs = {word: run for word, run in grid(setup).items() if word != "smofi"} | _split_methods(setup)
    return Recipe(
        runs=tuple(replace(r, name=f"{name}/{label}") for label, r in runs.items()),
        notes=(
            "T includes sending the models to the clients and back (model_sync); smofi_table2 leaves that out.",
            "Settings follow the SMoFi paper's CIFAR-10, with a small network, two local epochs and fewer rounds.",
            "One learning rate for all methods, chosen of 0.05 and 0.02 by the test accuracy of FedAvg in eight rounds "
            "and SFL-V2 in four, with seed 0: at 0.05 SFL-V2 stays at 10 % and FedAvg has 82.4 %, at 0.02 they have "
            "83.0 % and 80.3 %. So 0.02 is a compromise that costs FedAvg something; no method was tuned by itself.",
        ),
    )


# The tables; Figure 7 shows the curves of the first.

POOL = Choice("pool", {"kappa": 100.0})  # a server a hundred times as fast as the mean client
PARTICIPANTS = (10, 20, 30)


@experiment("SMoFi, Table 1")
def smofi_table1(name: str) -> Recipe:
    """SMoFi, Table 1 and Figure 7: three bases with five momentum methods on three image sets, Dir(0.2)."""
    family = {grid_label(base, plug): base for base in BASES for plug in plug_ins(TINY)}
    return Recipe(
        runs=named(name, {panel: grid(setup, tuple(BASES)) for panel, setup in IMAGES.items()}),
        published=published.SMOFI_TABLE1.by_run(name),
        notes=(*ON_IMAGES, ON_METHODS),
        against={
            f"{name}/{panel}/{label}": f"{name}/{panel}/{base}" for panel in IMAGES for label, base in family.items()
        },
    )


@experiment("SMoFi, Table 2")
def smofi_table2(name: str) -> Recipe:
    """SMoFi, Table 2: split methods, with the simulated time to FedAvg's accuracy."""
    return Recipe(
        runs=named(name, {panel: _split_methods(varied(setup, devices=POOL)) for panel, setup in IMAGES.items()}),
        published=published.SMOFI_TABLE2.by_run(name),
        notes=(
            *ON_IMAGES,
            "The paper's table has no row for FedAvg; it is run because its accuracy sets the target.",
            "Devices come from a synthetic pool in place of AI Benchmark and MobiPerf, so hours compare as ratios. "
            "Sending models takes no time, as in the paper; that flatters FedAvg, whose models are whole.",
            "MergeSFL's largest batch is the batch of the other methods.",
        ),
    )


def _split_methods(setup: Setup) -> dict[str, Run]:
    return {
        "fedavg": setup.run,
        "sfl_v1-step": using(setup.run, "sfl_v1", sync="step"),
        "sfl_v1-epoch": using(setup.run, "sfl_v1", sync="epoch"),
        "sfl_v2": using(setup.run, "sfl_v2"),
        "mergesfl": using(with_steps(setup.run, setup.steps), "mergesfl", regulate=True),
        "smofi": smofi(setup),
    }


@experiment("SMoFi, Table 3")
def smofi_table3(name: str) -> Recipe:
    """SMoFi, Table 3: FedAvg with the momentum methods on evener data, Dir(0.5) and IID."""
    dir05 = {f"{data}-dir05": varied(setup, partition=dirichlet(0.5, setup.batch)) for data, setup in IMAGES.items()}
    iid = {f"{data}-iid": varied(setup, partition=Choice("iid")) for data, setup in IMAGES.items()}
    return Recipe(
        runs=named(name, {panel: grid(setup) for panel, setup in (dir05 | iid).items()}),
        published={**published.SMOFI_TABLE3_DIR05.by_run(name), **published.SMOFI_TABLE3_IID.by_run(name)},
        notes=(*ON_IMAGES, ON_METHODS),
    )


@experiment("SMoFi, Table 4")
def smofi_table4(name: str) -> Recipe:
    """SMoFi, Table 4: Tiny-ImageNet with 10, 20 or 30 of 200 clients a round."""
    return Recipe(
        runs=named(name, {f"tiny-j{count}": grid(varied(TINY, per_round=count)) for count in PARTICIPANTS}),
        published=published.SMOFI_TABLE4.by_run(name),
        notes=(*ON_IMAGES, ON_METHODS),
    )


@experiment("SMoFi, Table 5")
def smofi_table5(name: str) -> Recipe:
    """SMoFi, Table 5: characters of Shakespeare and spoken words."""
    panels: Mapping[str, Setup] = {"shakespeare": SHAKESPEARE, "google_speech": GOOGLE_SPEECH}
    return Recipe(
        runs=named(name, {panel: grid(setup) for panel, setup in panels.items()}),
        published=published.SMOFI_TABLE5.by_run(name),
        notes=(
            "The paper gives neither rounds nor cuts here: 300 rounds; after two transformer layers, and after the "
            "second convolution of VGG-11.",
            "Shakespeare's clients are roles with at least 1000 samples. Of the complete plays, with a sample at every "
            "fourth character, 262 roles have as many, and the mean one 2,400: about 118 steps in five epochs, near "
            "the 115 of the fixed-step methods. With small roles too it would be 50.",
            "Speech trains one epoch a round: the paper's 15 steps for fixed-step methods are one epoch of the mean "
            "client, though it states five epochs everywhere. Try five with --set batching.epochs=5.",
            ON_WEIGHTS,
            "Spoken words are log-mel images of 32x32; VGG-11 has batch normalisation.",
            ON_PARTITIONS,
            ON_METHODS,
        ),
    )


# The figures that show results, without numbers.

ALPHAS = (-0.01, -0.1, -1.0, -10.0)
BLOCKS = range(9)  # residual blocks of ResNet-18 at the client
DEFAULT_BLOCKS = 2
BLOCK_RANGES = ((0, 3), (4, 7), (8, 13), (14, 16))  # of ResNet-34, a number drawn each round
BETAS = (0.1, 0.2, 0.3, 0.4, 0.5)
TARGETS = {"cifar10": 0.70, "cifar100": 0.43, "tiny": 0.30}


@experiment("SMoFi, Figure 1")
def smofi_fig1(name: str) -> Recipe:
    """SMoFi, Figure 1: what momentum in the local optimisers does to FedAvg on uneven data."""
    return Recipe(
        runs=named(name, {f"cifar10-dir{alpha:g}": _momentum_or_not(alpha) for alpha in (0.5, 0.2)}),
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


@experiment("SMoFi, Figure 3")
def smofi_fig3(name: str) -> Recipe:
    """SMoFi, Figure 3: staleness factors and cuts on CIFAR-10."""
    return Recipe(
        runs=named(name, {"cifar10": {**_by_alpha(CIFAR10), **_by_cut(CIFAR10)}}),
        claims=(
            "A staleness factor of -1 converges faster than -0.1 but ends lower.",
            "SMoFi beats FedAvg at every cut, by more the fewer blocks the clients hold.",
        ),
        notes=(ALPHAS_NOTE, DEFAULT_NOTE, *ON_IMAGES),
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
    Sweep(label="staleness factor", x=_alpha, log=True),
    Sweep(label="residual blocks at the client", x=_blocks),
)


@experiment("SMoFi, Figure 4")
def smofi_fig4(name: str) -> Recipe:
    """SMoFi, Figure 4: four local optimisers on CIFAR-100."""
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


@experiment("SMoFi, Figures 5 and 8")
def smofi_fig5(name: str) -> Recipe:
    """SMoFi, Figures 5 and 8: seven models on Tiny-ImageNet, 150 rounds."""
    return Recipe(
        runs=named(name, {model: grid(_on_tiny(network)) for model, network in NETWORKS.items()}),
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


@experiment("SMoFi, Figure 9")
def smofi_fig9(name: str) -> Recipe:
    """SMoFi, Figure 9: staleness factors and cuts on CIFAR-100 and Tiny-ImageNet."""
    panels = {
        "cifar100": {**_by_alpha(CIFAR100), **_by_cut(CIFAR100)},
        "tiny": {**_by_alpha(TINY), **_by_random_cut(TINY)},
    }
    return Recipe(
        runs=named(name, panels),
        claims=(
            "CIFAR-100: a smaller staleness factor slows down convergence and gains a little accuracy.",
            "Tiny-ImageNet: a larger staleness factor gains accuracy and hardly changes the speed.",
            "SMoFi beats FedAvg even with only the output block at the server; small cuts gain more.",
        ),
        notes=(ALPHAS_NOTE, DEFAULT_NOTE, RANGES_NOTE, *ON_IMAGES),
        figure=SETTINGS,
    )


@experiment("SMoFi, Figure 10")
def smofi_fig10(name: str) -> Recipe:
    """SMoFi, Figure 10: the global momentum of SMoFi and of FedAvgM."""
    panels = {
        panel: {
            **{f"smofi-beta{beta:g}": smofi(setup, beta=beta) for beta in BETAS},
            **{f"fedavgm-beta{beta:g}": using(setup.run, "fedavgm", beta=beta) for beta in BETAS},
        }
        for panel, setup in IMAGES.items()
    }
    return Recipe(
        runs=named(name, panels),
        claims=(
            "SMoFi beats FedAvgM in accuracy and in rounds for every global momentum.",
            "A larger global momentum is better on CIFAR-100 and Tiny-ImageNet.",
        ),
        notes=("The paper states the range 0.1 to 0.5; steps of 0.1 are chosen here.", *ON_IMAGES),
        targets={f"{name}/{panel}": target for panel, target in TARGETS.items()},
        figure=(Sweep(label="global momentum", x=lambda run: float(run.method.options["beta"])),),
    )


@experiment("SMoFi, Figure 11")
def smofi_fig11(name: str) -> Recipe:
    """SMoFi, Figure 11: SMoFi without its global momentum, and without the alignment of momenta."""
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
        claims=(
            "The alignment is the main gain, and grows from CIFAR-10 to CIFAR-100 to Tiny-ImageNet.",
            "The global momentum adds to it, most on Tiny-ImageNet.",
        ),
        notes=("FedAvg is run because its accuracy sets the target.", *ON_IMAGES),
    )
