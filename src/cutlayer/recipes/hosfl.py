"""What the recipes of the HO-SFL paper (Chen et al. 2026, arXiv 2603.14773) share: its settings and its methods."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cutlayer.batches import Batching
from cutlayer.config import Choice, Run
from cutlayer.data.augment import Augment
from cutlayer.recipes.compose import using

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


def for_images(setting: Setting, *, auxiliary_units: int = 2, align_epochs: int = ALIGN_EPOCHS) -> dict[str, Run]:
    """Every method of the paper's vision tasks; the auxiliary model of FSL-SAGE has the server's first stage."""
    auxiliary = {"auxiliary_units": auxiliary_units, "align_epochs": align_epochs}
    return {
        "sfl_v1": setting.by_epoch("sfl_v1"),
        "fsl_sage": setting.by_epoch("fsl_sage", server_interval=5, align_interval=1, **auxiliary),
        "zo_sfl": setting.by_epoch("zo_sfl", smoothing=SMOOTHING),
        "mu_splitfed": _mu_splitfed(setting),
        "hosfl": hosfl(setting, perturbations=5),
    }


def for_texts(setting: Setting) -> dict[str, Run]:
    """Every method of the paper's language tasks."""
    return {
        "splitlora": setting.by_epoch("splitlora", mode="per_client"),
        "zo_sfl": setting.by_epoch("zo_sfl", smoothing=SMOOTHING),
        "hosfl": hosfl(setting, perturbations=2),
    }


def hosfl(setting: Setting, *, perturbations: int, smoothing: float = SMOOTHING) -> Run:
    """HO-SFL's run."""
    return setting.by_step("hosfl", perturbations=perturbations, smoothing=smoothing)


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
