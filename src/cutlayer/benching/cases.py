"""The case that is timed: a model, its cut, the number of clients, and the device."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cutlayer import models, registry
from cutlayer.core import keys
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.checks import check, check_count
from cutlayer.core.method import Method
from cutlayer.core.precision import PRECISIONS, Precision
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition, dirichlet, iid
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods.smofi import smofi
from cutlayer.optim.optimiser import sgd
from cutlayer.split import Split

BASELINES = ("hand", "jax", "limit")
ENGINES = ("loop", "vmap", "graph")
LR, MOMENTUM, WEIGHT_DECAY, ALPHA, BETA = 0.05, 0.9, 5e-4, -0.1, 0.3  # of SMoFi on CIFAR-10
IMAGE, NUM_CLASSES = (3, 32, 32), 10  # as in CIFAR-10
WARM_UP = 2  # turns before the first timed one
BATCHES_HELD = 4  # by each client; further steps start again with the first
# End to end: five times as many clients as take part in a round hold data, as in SMoFi (20 of 100, 50,000 images).
HELD_PER_ROUND, SAMPLES_HELD, TRAIN_PER_TEST, DIRICHLET, EPOCHS = 5, 500, 5, 0.2, 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of one table, whose rows are the engines and then the baselines."""

    model: str
    cut: int | str = 3  # in ResNets after the stem and two residual blocks
    clients: int  # in a step
    batch: int
    precision: Precision
    device: str
    steps: int  # in a turn
    turns: int
    engines: tuple[str, ...]
    baselines: tuple[str, ...] = BASELINES
    end_to_end: bool = False  # whole rounds with data and evaluation, instead of steps
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("clients", "steps", "turns"):
            check_count(name, getattr(self, name))
        check(type(self.batch) is int and self.batch > 1, "batch", self.batch, "a whole number above 1")
        check(self.batch <= SAMPLES_HELD or not self.end_to_end, "batch", self.batch, f"{SAMPLES_HELD} at most")
        _check_names("precision", (self.precision,), PRECISIONS)
        for name in self.engines:
            if name in ("auto", "ray"):  # auto only chooses another engine, ray runs in other processes
                raise ConfigError(f"bench times graph, loop and vmap, not {name}")
        _check_names("engine", self.engines, ENGINES)
        _check_names("baseline", self.baselines, BASELINES)
        if self.end_to_end and self.baselines:
            raise ConfigError("end to end there are no baselines, only engines; leave the baselines out")
        if not self.engines and not self.baselines:
            raise ConfigError("there is nothing to time; name an engine or a baseline")


def usual(device: str, end_to_end: bool = False) -> dict[str, Any]:
    """Return the default settings of a device: the published ones on a GPU, about a minute of work on a CPU."""
    on_cpu = torch.device(device).type == "cpu"
    return {
        "model": "resnet_tiny" if on_cpu else "resnet18",
        "clients": 4 if on_cpu else 20,
        "batch": 32,
        "precision": "fp32" if on_cpu else "bf16",
        "device": device,
        "steps": 10 if on_cpu else 20,
        "turns": 5,
        "engines": tuple(name for name in ENGINES if not (on_cpu and name == "graph")),
        "baselines": () if end_to_end else BASELINES,
    }


def _check_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise UnknownNameError(what, name, known)


class BenchProblem:
    """The model and the samples of a case, on its device; every row starts from the same weights."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.net = _network(case)
        self.split = Split(self.net, case.cut)
        lower, upper = (len(model.params) for model in self.split.initial())
        if not lower or not upper:
            raise ConfigError(f"cut {self.split.cut} leaves one side nothing to train; cut between layers with weights")
        self.num_params = sum(p.numel() for p in self.net.parameters())
        num_samples = case.clients * case.batch * BATCHES_HELD
        if case.end_to_end:
            num_samples = case.clients * HELD_PER_ROUND * SAMPLES_HELD
        self.images, self.data = _noise(num_samples, case)
        self.test = _noise(num_samples // TRAIN_PER_TEST, case)[1] if case.end_to_end else None

    @cached_property
    def partition(self) -> Partition:
        case = self.case
        if not case.end_to_end:
            return iid(len(self.data), case.clients, key=case.seed)
        num_clients = case.clients * HELD_PER_ROUND
        return dirichlet(self.data.y, num_clients, alpha=DIRICHLET, min_size=case.batch, key=case.seed)

    @property
    def batching(self) -> Batching:
        case = self.case
        return (
            Batching(size=case.batch, epochs=EPOCHS) if case.end_to_end else Batching(size=case.batch, steps=case.steps)
        )

    def method(self) -> Method:
        client_opt, server_opt = (sgd(LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY) for _ in range(2))
        return smofi(model=self.split, client_opt=client_opt, server_opt=server_opt, alpha=ALPHA, beta=BETA)

    def batches(self, turn: int) -> Tensor:
        """Return the samples that a simulation draws for the round with this number: steps x clients x batch."""
        case = self.case
        walk = Walk(self.batching, self.partition.clients, keys.fold(case.seed, "round", turn), {})
        drawn = [[walk.samples(j, step) for j in range(case.clients)] for step in range(case.steps)]
        return torch.from_numpy(np.array(drawn)).to(case.device)


def _network(case: Case) -> nn.Module:
    """Build the model for these images; its initial weights are a function of the seed."""
    known = registry.options_of(registry.find("model", models.MODELS, case.model))
    facts = {"num_classes": NUM_CLASSES, "in_channels": IMAGE[0], "image_size": IMAGE[-1]}
    if "in_channels" not in known:
        raise ConfigError(
            f"the benchmark trains on images of {IMAGE[-1]} x {IMAGE[-1]}, which {case.model} does not read"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keys.fold(case.seed, "model"))
        net = models.build(case.model, **{k: v for k, v in facts.items() if k in known})
    return net.to(case.device)


def _noise(num_samples: int, case: Case) -> tuple[Tensor, Arrays]:
    """Return random images, and the same images with random labels."""
    random = torch.Generator(case.device).manual_seed(keys.fold(case.seed, "data", num_samples))
    x = torch.randn(num_samples, *IMAGE, generator=random, device=case.device)
    y = torch.randint(NUM_CLASSES, (num_samples,), generator=random, device=case.device)
    return x, Arrays(x=x, y=y, num_classes=NUM_CLASSES)
