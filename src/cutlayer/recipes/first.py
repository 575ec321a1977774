"""First experiments: the five basic methods side by side on image data with uneven classes."""

from dataclasses import replace

from cutlayer.core.batches import Batching
from cutlayer.recipes.recipe import Recipe, experiment
from cutlayer.runs.config import Choice, Run

BASIC_METHODS = ("fedavg", "sl", "sfl_v1", "sfl_v2", "mergesfl")


@experiment()
def digits(name: str) -> Recipe:
    """The embedded digits, 20 clients of which 10 a round: half a minute on two cores."""
    return _side_by_side(
        Run(
            name=name,
            data=name,
            clients=20,
            per_round=10,
            partition=Choice("dirichlet", {"alpha": 0.3, "min_size": 8}),
            model=Choice("cnn", {"width": 16}),
            cut="conv1",
            # No momentum: a server that never resets it (SL, SFL-V2) would carry one client's classes over to the next.
            optimiser=Choice("sgd", {"lr": 0.1}),
            batching=Batching(size=8),
            rounds=40,
            cpu_threads=1,
        )
    )


@experiment()
def fashion_mnist(name: str) -> Recipe:
    """Fashion-MNIST, 50 clients of which 10 a round, Dirichlet 0.2."""
    return _side_by_side(
        Run(
            name=name,
            data=name,
            clients=50,
            per_round=10,
            partition=Choice("dirichlet", {"alpha": 0.2, "min_size": 32}),
            model=Choice("cnn", {"width": 16}),
            cut="conv1",
            optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.9}),
            batching=Batching(size=32, epochs=1),
            rounds=40,
        )
    )


@experiment()
def cifar10(name: str) -> Recipe:
    """CIFAR-10 with ResNet-18 cut after two residual blocks, 100 clients of which 20 a round: for a GPU."""
    return _side_by_side(
        Run(
            name=name,
            data=name,
            clients=100,
            per_round=20,
            partition=Choice("dirichlet", {"alpha": 0.2, "min_size": 32}),
            model=Choice("resnet18"),
            cut="layer1.1",
            optimiser=Choice(
                "sgd",
                {
                    "lr": {"schedule": "exponential", "lr": 0.05, "decay": 0.998},
                    "momentum": 0.9,
                    "weight_decay": 5e-4,
                },
            ),
            batching=Batching(size=32, epochs=5),
            rounds=1000,
            eval_every=10,
            checkpoint_every=10,
        )
    )


def _side_by_side(run: Run) -> Recipe:
    return Recipe(
        runs=tuple(replace(run, name=f"{run.name}/{method}", method=Choice(method)) for method in BASIC_METHODS)
    )
