"""The methods of the HO-SFL paper with smaller models: experiments of our own for a small machine, or one GPU."""

from dataclasses import replace

from cutlayer.config import Choice
from cutlayer.recipes.compose import named
from cutlayer.recipes.hosfl import PARTITIONS, adamw, for_images, for_texts, images, texts
from cutlayer.recipes.recipe import Recipe

IMAGES_LR = 1e-4  # for all methods with AdamW
TEXTS_LR = 3e-4  # for all methods
ROUNDS = 310  # of the methods with one step a round, on CIFAR-10
SAMPLES = ROUNDS * 10 * 32  # for all methods
BETWEEN = 20_000  # samples from one evaluation to the next, on CIFAR-10
AUXILIARY_UNITS = 2  # of FSL-SAGE: the first two of the server's blocks, as many as the paper's ResNet-18 copies
ALIGN_EPOCHS = 10  # of FSL-SAGE: they take most of its time, more so the 100 of its authors' code
MAX_LENGTH = 48  # tokens: 99 of 100 prompts of SST-2 are shorter


def hosfl_cifar10() -> Recipe:
    """CIFAR-10, IID and Dir(1): the methods of HO-SFL's Table 2 with a MobileNetV2 from ImageNet weights."""
    name = "hosfl_cifar10"
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
    panels = {
        panel: for_images(setting, auxiliary_units=AUXILIARY_UNITS, align_epochs=ALIGN_EPOCHS)
        for panel, setting in settings.items()
    }
    return Recipe(
        runs=named(name, panels),
        source="an experiment of this package",
        notes=(
            f"The setting is that of HO-SFL's Table 2 but for the learning rate, {SAMPLES:,} samples instead of "
            "160,000, and the network, which has the same 2048 values a sample at the cut.",
            "The weights are a file with torchvision's names, which you bring: mobilenet_v2.safetensors in the working "
            "or the data folder, or --set weights=FILE. Its last layer is drawn anew.",
            f"One learning rate, {IMAGES_LR:g}, for all methods with AdamW; MU-SplitFed has SGD as in the paper.",
            f"FSL-SAGE aligns with {ALIGN_EPOCHS} passes over its samples, a tenth of its authors'.",
        ),
        axis="samples",
    )


def hosfl_sst2() -> Recipe:
    """SST-2: the methods of HO-SFL's Table 1 with a language model of 15 million parameters."""
    name = "hosfl_sst2"
    setting = texts("sst2", "stories15m", layers=3, optimiser=adamw(TEXTS_LR), max_length=MAX_LENGTH)
    runs = for_texts(replace(setting, run=replace(setting.run, engine="loop")))
    return Recipe(
        runs=named(name, {"stories15m": runs}),
        source="an experiment of this package",
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
