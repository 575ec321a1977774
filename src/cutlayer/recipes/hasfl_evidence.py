"""The policies of the HASFL paper on Fashion-MNIST: an experiment of our own that a small machine can run."""

from dataclasses import replace
from itertools import product

from cutlayer.batches import Batching
from cutlayer.config import Choice, Run
from cutlayer.recipes.compose import named
from cutlayer.recipes.hasfl import BATCH, PARTITIONS, policies, table1
from cutlayer.recipes.recipe import Recipe

LR = 0.05
ROUNDS = 100  # at most
INTERVAL = 15
TARGET = 0.75  # test accuracy, with which a run ends

FASHION_MNIST = Run(
    data="fashion_mnist",
    clients=20,
    model=Choice("cnn", {"width": 16}),
    cut="conv1",
    optimiser=Choice("sgd", {"lr": LR}),
    batching=Batching(size=BATCH),
    rounds=ROUNDS,
    until_accuracy=TARGET,
    engine="loop",  # so that every machine takes the same one
    cpu_threads=1,
    checkpoint_every=5,
)
DEVICES = {
    "table1": table1(),
    "strong": table1(tflops=(0.1, 2.0), mbits_up=(10.0, 80.0)),
}


def hasfl_fashion_mnist() -> Recipe:
    """Fashion-MNIST, IID and two shards each: HASFL's five policies by simulated time, on two sets of devices."""
    name = "hasfl_fashion_mnist"
    panels = {
        f"{partition}-{devices}": policies(
            replace(FASHION_MNIST, partition=PARTITIONS[partition], devices=DEVICES[devices]),
            INTERVAL,
            least_batch=1,
        )
        for partition, devices in product(PARTITIONS, DEVICES)
    }
    return Recipe(
        runs=named(name, panels),
        source="an experiment of this package",
        notes=(
            "The devices of table1 are those of the HASFL paper's Table I; those of strong are Table I's with 0.1 to 2 "
            "TFLOPS and 10 to 80 Mbit/s up. A network this small takes such devices no time to compute: links decide.",
            f"A round is {INTERVAL} mini-batches of every device, with cuts and batch sizes of its own. Plain SGD, one "
            "learning rate for all. A run ends when it reaches the target.",
        ),
        targets={f"{name}/{panel}": TARGET for panel in panels},
        race="time",
    )
