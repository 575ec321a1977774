"""The HO-SFL paper (Chen et al. 2026, arXiv 2603.14773): its settings, methods, tables and figures.

Figure 5 is `cutlayer overlap`. Two recipes have smaller models, for a small machine or one GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cutlayer.core.batches import Batching
from cutlayer.data.augment import Augment
from cutlayer.recipes.compose import Panels, Runs, dirichlet, drawn_by_torch, experiment, using
from cutlayer.recipes.recipe import Apart, Sweep
from cutlayer.runs.config import Choice, Run

BATCH = 32
SMOOTHING = 1e-3
LR = 1e-5
PARTITIONS: Mapping[str, Choice] = {"iid": Choice("iid"), "dir1": dirichlet(1.0, BATCH)}
ALIGN_EPOCHS = 100  # of FSL-SAGE, as in its authors' code
TRAIN = {"sst2": 67_349, "wsc": 554, "rte": 2_490}  # sentences to train on, in all


def adamw(lr: float = LR) -> Choice:
    """Return the optimiser of every method but MU-SplitFed, on both sides."""
    return Choice("adamw", {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 5e-4})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data and a model. Runs end after a number of samples, because a round is an epoch or one step, by method."""

    run: Run
    held: int  # samples of a client, on average
    between: int  # samples from one evaluation to the next, roughly

    def by_epoch(self, method: str, **options: Any) -> Run:
        """Return the run with a method whose round is one epoch of its clients."""
        return self._measured(using(self.run, method, **options), self.held)

    def by_step(self, method: str, **options: Any) -> Run:
        """Return the run with a method whose round is one step of its clients."""
        return self._measured(using(self.run, method, **options), BATCH)

    def _measured(self, run: Run, samples: int) -> Run:
        """Set how often the run is evaluated, if each client of a round processes this many samples."""
        rounds = max(1, round(self.between / (samples * (run.per_round or run.clients))))
        return replace(run, eval_every=rounds, checkpoint_every=5 * rounds)


def _run(samples: int, clients: int, per_round: int, **settings: Any) -> Run:
    """Return a run with as many rounds as a method with one step a round needs for the samples; others end sooner."""
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
    """Return CIFAR-10 or CIFAR-100 with ResNet-18 from ImageNet weights, with these keys of the run changed."""
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
    """Return a text task with a decoder from the hub or a folder, of which clients hold this many layers."""
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


def for_images(setting: Setting, align_epochs: int = ALIGN_EPOCHS) -> Runs:
    """Return every method of the paper's vision tasks; FSL-SAGE's auxiliary model is the server's first two blocks."""
    auxiliary = {"auxiliary_units": 2, "align_epochs": align_epochs}
    return {
        "sfl_v1": setting.by_epoch("sfl_v1"),
        "fsl_sage": setting.by_epoch("fsl_sage", server_interval=5, align_interval=1, **auxiliary),
        "zo_sfl": setting.by_epoch("zo_sfl", smoothing=SMOOTHING),
        "mu_splitfed": _mu_splitfed(setting),
        "hosfl": setting.by_step("hosfl", perturbations=5, smoothing=SMOOTHING),
    }


def for_texts(setting: Setting) -> Runs:
    """Return every method of the paper's language tasks."""
    return {
        "splitlora": setting.by_epoch("splitlora", mode="per_client"),
        "zo_sfl": setting.by_epoch("zo_sfl", smoothing=SMOOTHING),
        "hosfl": setting.by_step("hosfl", perturbations=2, smoothing=SMOOTHING),
    }


def _mu_splitfed(setting: Setting) -> Run:
    run = setting.by_step("mu_splitfed", server_steps=2, global_lr=0.3, smoothing=SMOOTHING)
    return replace(run, optimiser=Choice("sgd", {"lr": 0.005}), server_optimiser=Choice("sgd", {"lr": 0.01}))


# Experiments of our own.

ROUNDS = 310  # of the methods with one step a round, on CIFAR-10
FEW_EPOCHS = 10  # of FSL-SAGE's alignment, which takes most of its time, instead of the 100 of its authors' code
MAX_LENGTH = 48  # tokens: 99 of 100 prompts of SST-2 are shorter
MOBILENET: Mapping[str, Any] = {
    "model": Choice("mobilenet_v2", {"stem": "3x3"}),
    "cut": "block6",
    "weights": "mobilenet_v2.safetensors",
    "fresh": ("classifier",),
    "optimiser": adamw(1e-4),
    "engine": "loop",  # the same on every machine
    "rounds": ROUNDS,
    "until_samples": ROUNDS * 10 * BATCH,
}


@experiment()
def hosfl_cifar10() -> Panels:
    settings = {word: replace(images("cifar10", word, **MOBILENET), between=20_000) for word in PARTITIONS}
    return {f"cifar10-{word}": for_images(setting, FEW_EPOCHS) for word, setting in settings.items()}


@experiment()
def hosfl_sst2() -> Panels:
    setting = texts("sst2", "stories15m", layers=3, optimiser=adamw(3e-4), max_length=MAX_LENGTH)
    return {"stories15m": for_texts(replace(setting, run=replace(setting.run, engine="loop")))}


# The tables, and the figures that show accuracies.

EPOCHS = 33  # rounds of 5,000 samples until more than 160,000 are processed
DRAWN = drawn_by_torch("resnet18", stem="imagenet")
STILL = Choice("sgd", {"lr": 1e-9})  # for MU-SplitFed, which diverges from random weights at its own rates
DECODERS: Mapping[str, dict[str, Any]] = {
    "opt": {"path": "facebook/opt-125m", "layers": 3},
    "gemma": {"path": "google/gemma-3-270m", "layers": 5},
    "llama": {"path": "meta-llama/Llama-3.2-1B", "layers": 5, "dtype": "bfloat16"},
}
LAYERS = (2, 4, 6, 8)  # Figure 7
PERTURBATIONS = (1, 2, 5, 10, 20, 50)  # Figure 8(a), with
FIXED_SMOOTHING = 1e-4
SMOOTHINGS = (1e-5, 1e-4, 1e-3, 1e-2)  # Figure 8(b), with
FIXED_PERTURBATIONS = 10


@experiment()
def hosfl_table1() -> Panels:
    return {
        f"{model}-{task}": for_texts(texts(task, **options))
        for (model, options), task in product(DECODERS.items(), TRAIN)
    }


@experiment()
def hosfl_table2() -> Panels:
    return _on("cifar10") | _on("cifar100")


@experiment()
def hosfl_fig3() -> Panels:
    return _on("cifar10")


@experiment()
def hosfl_fig6() -> Panels:
    return _on("cifar100")


def _on(data: str) -> dict[str, Runs]:
    """Return all methods on this data set, IID and uneven."""
    return {f"{data}-{partition}": for_images(images(data, partition)) for partition in PARTITIONS}


@experiment()
def hosfl_table3() -> Panels:
    return {"cifar10-iid": _crossing()}


@experiment()
def hosfl_fig4() -> Panels:
    return {"cifar10-iid": _crossing()}


def _crossing() -> Runs:
    """Return runs as long as the paper's in rounds."""
    runs = for_images(images("cifar10", "iid", model=DRAWN, weights=None, fresh=()), align_epochs=1)
    runs["mu_splitfed"] = replace(runs["mu_splitfed"], optimiser=STILL, server_optimiser=None)
    for label, run in runs.items():
        rounds = EPOCHS if label in ("sfl_v1", "fsl_sage", "zo_sfl") else run.rounds
        runs[label] = replace(run, rounds=rounds, eval_every=rounds, until_samples=None)
    return runs


@experiment()
def hosfl_fig7() -> Panels:
    settings = {layers: texts("sst2", **{**DECODERS["llama"], "layers": layers}) for layers in LAYERS}
    return {"llama-sst2": {f"cut{layers}": for_texts(setting)["hosfl"] for layers, setting in settings.items()}}


def _perturbations(run: Run) -> float | Apart:
    options = run.method.options
    return float(options["perturbations"]) if options["smoothing"] == FIXED_SMOOTHING else Apart.ABSENT


def _smoothing(run: Run) -> float | Apart:
    options = run.method.options
    return float(options["smoothing"]) if options["perturbations"] == FIXED_PERTURBATIONS else Apart.ABSENT


@experiment(
    figure=(
        Sweep(label="perturbations", x=_perturbations, log=True),
        Sweep(label="smoothing", x=_smoothing, log=True),
    )
)
def hosfl_fig8() -> Panels:
    setting = images("cifar10", "iid")
    by_number = [(number, FIXED_SMOOTHING) for number in PERTURBATIONS]
    by_distance = [(FIXED_PERTURBATIONS, distance) for distance in SMOOTHINGS]
    runs = {
        f"p{number}-mu{distance:.0e}": setting.by_step("hosfl", perturbations=number, smoothing=distance)
        for number, distance in dict.fromkeys(by_number + by_distance)
    }
    return {"cifar10-iid": runs}
