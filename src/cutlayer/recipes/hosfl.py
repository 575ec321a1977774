"""The HO-SFL paper (Chen et al. 2026, arXiv 2603.14773): its settings, methods, tables and figures.

Figure 5 is `cutlayer overlap`. Below are its methods with smaller models, for a small machine or one GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.data.augment import Augment
from cutlayer.recipes import published
from cutlayer.recipes.compose import drawn_by_torch, named, using
from cutlayer.recipes.recipe import OURS, Apart, Recipe, Sweep, experiment
from cutlayer.runs.config import Choice, Run

BATCH = 32
SMOOTHING = 1e-3
LR = 1e-5
PARTITIONS: Mapping[str, Choice] = {
    "iid": Choice("iid"),
    "dir1": Choice("dirichlet", {"alpha": 1.0, "min_size": BATCH}),
}
ALIGN_EPOCHS = 100  # of FSL-SAGE, as in its authors' code
TRAIN = {"sst2": 67_349, "wsc": 554, "rte": 2_490}  # sentences to train on, in all


def adamw(lr: float = LR) -> Choice:
    """The optimiser of every method but MU-SplitFed, on both sides."""
    return Choice("adamw", {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 5e-4})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data and a model. Runs end by samples, as a round is an epoch of some methods and one step of others."""

    run: Run
    held: int  # samples of a client, on average
    between: int  # samples from one evaluation to the next, about

    def by_epoch(self, method: str, **options: Any) -> Run:
        """With a method whose round is one epoch of its clients."""
        return self._measured(using(self.run, method, **options), self.held)

    def by_step(self, method: str, **options: Any) -> Run:
        """With a method whose round is one step of its clients."""
        return self._measured(using(self.run, method, **options), BATCH)

    def _measured(self, run: Run, samples: int) -> Run:
        """Each client of a round processes so many."""
        rounds = max(1, round(self.between / (samples * (run.per_round or run.clients))))
        return replace(run, eval_every=rounds, checkpoint_every=5 * rounds)


def _run(samples: int, clients: int, per_round: int, **settings: Any) -> Run:
    """The rounds are as many as methods with one step a round need for the samples; others end sooner."""
    return Run(
        clients=clients,
        per_round=per_round,
        batching=Batching(size=BATCH, drop_last=False),
        **{
            "rounds": -(-samples // (per_round * BATCH)),
            "until_samples": samples,
            "optimiser": adamw(),
            **settings,
        },
    )


def images(data: str, partition: str, **changes: Any) -> Setting:
    """CIFAR-10 or CIFAR-100 with ResNet-18 from ImageNet weights, and what is to be changed of its run."""
    settings: dict[str, Any] = {
        "data": data,
        "partition": PARTITIONS[partition],
        "augment": Augment(crop=4, flip=True),
        "model": Choice("resnet18", {"stem": "imagenet"}),
        "cut": "layer2.1",
        "weights": "resnet18.safetensors",
        "fresh": ("fc",),
        "freeze_norms": True,
    }
    return Setting(run=_run(160_000, clients=100, per_round=10, **{**settings, **changes}), held=500, between=5_000)


def texts(data: str, path: str, layers: int, *, optimiser: Choice | None = None, **model: Any) -> Setting:
    """A task of texts with a decoder of the hub, or a folder of one, of which clients hold so many layers."""
    clients = 10
    adapters = {"path": path, "rank": 8, "alpha": 16.0, "targets": ("q_proj", "v_proj")}
    run = _run(
        80_000,
        clients=clients,
        per_round=3,
        data=data,
        partition=PARTITIONS["iid"],
        model=Choice("causal_lm", {**adapters, **model}),
        cut=f"layer{layers}",
        optimiser=optimiser or adamw(),
    )
    return Setting(run=run, held=TRAIN[data] // clients, between=4_000)


def for_images(setting: Setting, align_epochs: int = ALIGN_EPOCHS) -> dict[str, Run]:
    """Every method of the paper's vision tasks; the auxiliary model of FSL-SAGE has the server's first two blocks."""
    auxiliary = {"auxiliary_units": 2, "align_epochs": align_epochs}
    return {
        "sfl_v1": setting.by_epoch("sfl_v1"),
        "fsl_sage": setting.by_epoch("fsl_sage", server_interval=5, align_interval=1, **auxiliary),
        "zo_sfl": setting.by_epoch("zo_sfl", smoothing=SMOOTHING),
        "mu_splitfed": _mu_splitfed(setting),
        "hosfl": setting.by_step("hosfl", perturbations=5, smoothing=SMOOTHING),
    }


def for_texts(setting: Setting) -> dict[str, Run]:
    """Every method of the paper's language tasks."""
    return {
        "splitlora": setting.by_epoch("splitlora", mode="per_client"),
        "zo_sfl": setting.by_epoch("zo_sfl", smoothing=SMOOTHING),
        "hosfl": setting.by_step("hosfl", perturbations=2, smoothing=SMOOTHING),
    }


def _mu_splitfed(setting: Setting) -> Run:
    run = setting.by_step("mu_splitfed", server_steps=2, global_lr=0.3, smoothing=SMOOTHING)
    return replace(run, optimiser=Choice("sgd", {"lr": 0.005}), server_optimiser=Choice("sgd", {"lr": 0.01}))


ON_LENGTH = (
    "A run ends with the first round in which its clients have processed the samples in all, whatever a round is: one "
    "epoch of the drawn clients, or one step (HO-SFL, MU-SplitFed). The best accuracy stands beside the paper's, "
    "which is the final one in Table 2; --json tells both."
)
ON_IMAGES = (
    "The weights are a file with torchvision's names, which you bring: resnet18.safetensors in the working or the data "
    "folder, or --set weights=FILE. Its last layer is drawn anew.",
    "ResNet-18 has the ImageNet stem on images of 32x32: by the paper's traffic 2048 values a sample cross the cut.",
    "Crops are of images padded by 4; clients of an uneven partition hold at least a batch; the last, smaller batch of "
    "an epoch is kept, as the traffic tells too. MU-SplitFed moves weights by 1e-3.",
    "FSL-SAGE aligns with 100 passes of Adam at 0.001 over at most 1000 samples, as its authors' code does.",
    ON_LENGTH,
)
ON_TEXTS = (
    "The models are those of the hub's cache, or folders of these names in the working or the data folder; nothing is "
    "downloaded.",
    "Clients hold the embedding too. The paper counts 20 layers of Gemma-3-270M and 18 of LLaMA-3.2-1B; their "
    "checkpoints have 18 and 16, so the server holds 13 and 11.",
    "The paper gives no prompts, lengths or types: here a prompt and two words to choose from, at most 256 tokens, "
    "float32; for LLaMA a base of bfloat16 with adapters of float32. Slopes of HO-SFL are coarse in bfloat16 (see its "
    "page): --set model.dtype=float32, or a smoothing of 0.01, makes them exact to a few percent.",
    "The accuracy is that of the published validation sets; labels of the test sets are not public.",
    ON_LENGTH,
)


# Experiments of our own.

IMAGES_LR = 1e-4  # for all methods with AdamW
TEXTS_LR = 3e-4  # for all methods
ROUNDS = 310  # of the methods with one step a round, on CIFAR-10
SAMPLES = ROUNDS * 10 * 32  # for all methods
BETWEEN = 20_000  # samples from one evaluation to the next, on CIFAR-10
FEW_EPOCHS = 10  # of FSL-SAGE: they take most of its time, more so the 100 of its authors' code
MAX_LENGTH = 48  # tokens: 99 of 100 prompts of SST-2 are shorter


@experiment(OURS)
def hosfl_cifar10(name: str) -> Recipe:
    """CIFAR-10, IID and Dir(1): the methods of HO-SFL's Table 2 with a MobileNetV2 from ImageNet weights."""
    changes = {
        "model": Choice("mobilenet_v2", {"stem": "3x3"}),
        "cut": "block6",
        "weights": "mobilenet_v2.safetensors",
        "fresh": ("classifier",),
        "optimiser": adamw(IMAGES_LR),
        "engine": "loop",  # so that every machine takes the same one
        "rounds": ROUNDS,
        "until_samples": SAMPLES,
    }
    settings = {
        f"cifar10-{partition}": replace(images("cifar10", partition, **changes), between=BETWEEN)
        for partition in PARTITIONS
    }
    return Recipe(
        runs=named(name, {panel: for_images(setting, FEW_EPOCHS) for panel, setting in settings.items()}),
        notes=(
            f"The setting is that of HO-SFL's Table 2 but for the learning rate, {SAMPLES:,} samples instead of "
            "160,000, and the network, which has the same 2048 values a sample at the cut.",
            "The weights are a file with torchvision's names, which you bring: mobilenet_v2.safetensors in the working "
            "or the data folder, or --set weights=FILE. Its last layer is drawn anew.",
            f"One learning rate, {IMAGES_LR:g}, for all methods with AdamW; MU-SplitFed has SGD as in the paper.",
            f"FSL-SAGE aligns with {FEW_EPOCHS} passes over its samples, a tenth of its authors'.",
        ),
        axis="samples",
    )


@experiment(OURS)
def hosfl_sst2(name: str) -> Recipe:
    """SST-2: the methods of HO-SFL's Table 1 with a language model of 15 million parameters."""
    setting = texts("sst2", "stories15m", layers=3, optimiser=adamw(TEXTS_LR), max_length=MAX_LENGTH)
    runs = for_texts(replace(setting, run=replace(setting.run, engine="loop")))
    return Recipe(
        runs=named(name, {"stories15m": runs}),
        notes=(
            "The setting is that of HO-SFL's Table 1 but for the learning rate and the model, stories15m: of LLaMA's "
            "architecture, with six layers, of which clients hold three. It is a folder of that name in the working or "
            "the data folder.",
            f"Of a prompt that is longer, the last {MAX_LENGTH} tokens are read.",
            f"One learning rate for all methods, {TEXTS_LR:g}. The accuracy is that of the published validation set.",
            "Methods with an epoch a round end after four rounds, with as many evaluations.",
        ),
        axis="samples",
    )


# The tables.

EPOCHS = 33  # rounds: the first after which more than 160,000 samples are processed, at 5,000 a round
DRAWN = drawn_by_torch("resnet18", stem="imagenet")
STILL = Choice("sgd", {"lr": 1e-9})  # for MU-SplitFed with random weights, from which it diverges at its own rates
DECODERS: Mapping[str, dict[str, Any]] = {
    "opt": {"path": "facebook/opt-125m", "layers": 3},
    "gemma": {"path": "google/gemma-3-270m", "layers": 5},
    "llama": {"path": "meta-llama/Llama-3.2-1B", "layers": 5, "dtype": "bfloat16"},
}


@experiment("HO-SFL, Table 1")
def hosfl_table1(name: str) -> Recipe:
    """HO-SFL, Table 1: three language models fine-tuned on three tasks, with adapters."""
    panels = {
        f"{model}-{task}": for_texts(texts(task, **options))
        for (model, options), task in product(DECODERS.items(), TRAIN)
    }
    return Recipe(
        runs=named(name, panels),
        published=published.HOSFL_TABLE1.by_run(name),
        claims=(
            "HO-SFL is close to SplitLoRA, and better on RTE with LLaMA-3.2-1B.",
            "ZO-SFL does not converge on most tasks.",
        ),
        notes=(
            "The paper's text says 93.2 % of HO-SFL with LLaMA on SST-2, its table 93.9 %: the table counts.",
            "The paper calls all tasks GLUE's; by their sizes WSC and RTE are SuperGLUE's. ZO-SFL's 36.5 % on WSC are "
            "38 of 104, which one and the same answer gets.",
            "On SST-2 methods with an epoch a round end after four rounds, with as many evaluations.",
            *ON_TEXTS,
        ),
        axis="samples",
    )


@experiment("HO-SFL, Table 2")
def hosfl_table2(name: str) -> Recipe:
    """HO-SFL, Table 2: five methods on CIFAR-10 and CIFAR-100, IID and Dir(1), after 160,000 samples."""
    return Recipe(
        runs=named(name, _panels("cifar10", "cifar100")),
        published=published.HOSFL_TABLE2.by_run(name),
        claims=ON_ORDER,
        notes=ON_IMAGES,
        axis="samples",
    )


ON_ORDER = (
    "On IID CIFAR-10 HO-SFL is slightly below SFL; on uneven data it is above.",
    "Zeroth-order methods do not converge within the samples.",
)


def _panels(*data: str) -> dict[str, dict[str, Run]]:
    """All methods on these data sets, IID and uneven."""
    return {f"{name}-{partition}": for_images(images(name, partition)) for name, partition in product(data, PARTITIONS)}


@experiment("HO-SFL, Table 3")
def hosfl_table3(name: str) -> Recipe:
    """HO-SFL, Table 3: what crosses in a run on IID CIFAR-10; read it with `cutlayer compare --traffic`."""
    return _traffic(name)


def _traffic(name: str, claims: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Recipe:
    panel = "cifar10-iid"
    return Recipe(
        runs=named(name, {panel: _crossing()}),
        traffic={f"{name}/{panel}/{label}": cells for label, cells in published.HOSFL_TABLE3.items()},
        claims=claims,
        notes=(
            *notes,
            f"`cutlayer compare runs/{name} --traffic --samples 160000 --paper-convention` is the table; GB are GiB.",
            "What crosses does not depend on the weights, so these are random and accuracies mean nothing here; "
            "FSL-SAGE aligns with one pass, and MU-SplitFed learns next to nothing, as it would diverge.",
            "Of what FSL-SAGE sends down the paper counts the auxiliary model only. A round of HO-SFL and MU-SplitFed "
            "draws full batches here, so that 500 of them have 160,000 samples; the paper's 12.97 for MU-SplitFed are "
            "13.00 where clients go through their samples, and 12.75 here.",
        ),
        axis="samples",
    )


def _crossing() -> dict[str, Run]:
    """Runs as long as the paper's, by rounds."""
    runs = for_images(images("cifar10", "iid", model=DRAWN, weights=None, fresh=()), align_epochs=1)
    runs["mu_splitfed"] = replace(runs["mu_splitfed"], optimiser=STILL, server_optimiser=None)
    by_epoch = ("sfl_v1", "fsl_sage", "zo_sfl")
    lengths = {label: EPOCHS if label in by_epoch else run.rounds for label, run in runs.items()}
    return {
        label: replace(run, rounds=lengths[label], eval_every=lengths[label], until_samples=None)
        for label, run in runs.items()
    }


# The figures that show accuracies.

LAYERS = (2, 4, 6, 8)  # Figure 7
PERTURBATIONS = (1, 2, 5, 10, 20, 50)  # Figure 8(a), with
FIXED_SMOOTHING = 1e-4
SMOOTHINGS = (1e-5, 1e-4, 1e-3, 1e-2)  # Figure 8(b), with
FIXED_PERTURBATIONS = 10


@experiment("HO-SFL, Figure 3")
def hosfl_fig3(name: str) -> Recipe:
    """HO-SFL, Figure 3: accuracy against processed samples on CIFAR-10, the runs of Table 2."""
    return _curves(name, "cifar10", ON_ORDER)


@experiment("HO-SFL, Figure 4")
def hosfl_fig4(name: str) -> Recipe:
    """HO-SFL, Figure 4(a): the runs of Table 3; 4(b), the clients' memory, is `cutlayer profile --memory`."""
    claims = (
        "In all 2.44 GB cross with HO-SFL, 4.20 with SFL and ZO-SFL, 3.71 with FSL-SAGE.",
        "(b) With 8 layers of LLaMA-3.2-1B a client takes 8.78 GB with SFL, 4.14 GB with HO-SFL and 4.01 GB for "
        "inference; to train all of the model takes 20.81 GB.",
    )
    notes = (
        "Part (b) needs no run: `cutlayer profile causal_lm --set path=llama-3.2-1b --memory --cut layer8 --optimiser "
        "adamw --device cuda`.",
    )
    return _traffic(name, claims, notes)


@experiment("HO-SFL, Figure 6")
def hosfl_fig6(name: str) -> Recipe:
    """HO-SFL, Figure 6: accuracy against processed samples on CIFAR-100, the runs of Table 2."""
    return _curves(name, "cifar100", ("HO-SFL ends above SFL, and zeroth-order methods do not converge.",))


def _curves(name: str, data: str, claims: tuple[str, ...]) -> Recipe:
    return Recipe(
        runs=named(name, _panels(data)),
        claims=claims,
        notes=("The paper's curves are of ten seeds: --seeds 10.", *ON_IMAGES),
        axis="samples",
    )


@experiment("HO-SFL, Figure 7")
def hosfl_fig7(name: str) -> Recipe:
    """HO-SFL, Figure 7: 2, 4, 6 and 8 layers of LLaMA-3.2-1B at the client, on SST-2."""
    settings = {layers: texts("sst2", **{**DECODERS["llama"], "layers": layers}) for layers in LAYERS}
    runs = {f"cut{layers}": for_texts(setting)["hosfl"] for layers, setting in settings.items()}
    return Recipe(
        runs=named(name, {"llama-sst2": runs}),
        published=published.HOSFL_FIG7.by_run(name),
        claims=("The more layers a client has, the slower HO-SFL converges, but only slightly.",),
        notes=("The paper says approx. 94.5 % and around 93.0 %.", *ON_TEXTS),
        axis="samples",
    )


@experiment("HO-SFL, Figure 8")
def hosfl_fig8(name: str) -> Recipe:
    """HO-SFL, Figure 8: the number of perturbations, and how far they go, on CIFAR-10."""
    setting = images("cifar10", "iid")
    by_number = [(number, FIXED_SMOOTHING) for number in PERTURBATIONS]
    by_distance = [(FIXED_PERTURBATIONS, distance) for distance in SMOOTHINGS]
    runs = {
        f"p{number}-mu{distance:.0e}": setting.by_step("hosfl", perturbations=number, smoothing=distance)
        for number, distance in dict.fromkeys(by_number + by_distance)
    }
    return Recipe(
        runs=named(name, {"cifar10-iid": runs}),
        claims=(
            "Accuracy rises with the number of perturbations.",
            "It falls where a perturbation goes further than 1e-3, and where one is too small for the arithmetic.",
        ),
        notes=(
            "The paper gives the ends, 1 to 50 and 1e-5 to 1e-2, and not the values between; nor the partition (IID).",
            *ON_IMAGES,
        ),
        axis="samples",
        figure=(
            Sweep(label="perturbations", x=_perturbations, log=True),
            Sweep(label="smoothing", x=_smoothing, log=True),
        ),
    )


def _perturbations(run: Run) -> float | Apart:
    options = run.method.options
    return float(options["perturbations"]) if options["smoothing"] == FIXED_SMOOTHING else Apart.ABSENT


def _smoothing(run: Run) -> float | Apart:
    options = run.method.options
    return float(options["smoothing"]) if options["perturbations"] == FIXED_PERTURBATIONS else Apart.ABSENT
