"""Small worlds that the tests of the core share: ragged clients, tiny images and models, and rounds by hand."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc  # noqa: F401 (before cutlayer.remote, which silences it: tests read there why a handshake failed)
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cutlayer import methods, models
from cutlayer.core import keys
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.method import Method
from cutlayer.core.state import State
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.engines.graph import compiling
from cutlayer.pieces.sampler import shuffled
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.simulation import Simulation

os.environ.pop("COLUMNS", None)  # messages are wrapped only where a test says how wide its terminal is

SIZES = (12, 20, 9, 20, 3)  # in batches of 4: 3, 5, 2 and 5 steps, and a client with less than a batch
BATCH = Batching(size=4)
SEED = 3
NUM_UNITS = 5  # of resnet_tiny
# What a method needs to be told where it is one of many: HASFL plans for devices, and here there are none.
TOLD: dict[str, dict[str, Any]] = {
    "hasfl": {"interval": 3, "batches": "fixed", "cuts": "fixed"},
    "fsl_sage": {"align_epochs": 2},
    "zo_sfl": {"smoothing": 0.1},  # rounding is divided by it
}
ONE_STEP = ("hosfl", "mu_splitfed")  # a round of theirs is one mini-batch
OWN_LENGTH = ("hasfl", *ONE_STEP)  # who count the mini-batches of a round themselves
GENERAL = tuple(name for name in methods.METHODS if name != "splitlora")  # who train any model, also without adapters
FROZEN_NORMS = ("hosfl", "zo_sfl", "mu_splitfed", "splitlora")  # who need them, or something else, not to train
TWO_PART_ONLY = ("hosfl", "zo_sfl", "mu_splitfed", "fsl_sage")  # who need the loss at the server
# Codecs of each sort, by the name of the set.
TOPK = {"name": "topk", "share": 0.3}
CODECS: dict[str, dict[str, Any]] = {
    "rounded": {"activations": "int8", "gradients": {"name": "int4", "per": "channel"}, "model": "bf16"},
    "sparse": {
        "activations": {"name": "randtopk", "share": 0.4, "alpha": 0.2},
        "gradients": [TOPK, "int8"],
        "model": {**TOPK, "error_feedback": True},
    },
    "noisy": {
        "activations": [{"name": "clip", "norm": 5.0}, "int8"],
        "gradients": {"name": "gaussian", "std": 1e-3, "clip": 1.0},
        "model": [{"name": "laplace", "scale": 1e-4, "clip": 10.0}, TOPK],
    },
    "low rank": {"model": {"name": "lowrank", "rank": 1, "error_feedback": True}},
}

torch.set_num_threads(1)
sys.path.append(str(Path(__file__).parents[1] / "bench"))  # tests import the scripts there


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Make torch's compiler trace but generate no kernels; yield the size of each graph that it compiles."""
    compiled: list[int] = []
    compile = torch.compile

    def counted(traced: torch.fx.GraphModule, **options: Any) -> Any:
        compiled.append(len(list(traced.graph.nodes)))
        return compile(traced, **options)

    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(torch, "compile", counted)
    yield compiled
    torch.compiler.reset()


def using(run: Run, method: str) -> Run:
    """The run with this method, and without `steps` if the method counts the mini-batches of a round itself."""
    batching = replace(run.batching, steps=None) if method in OWN_LENGTH else run.batching
    choice = Choice(method, TOLD.get(method, {}))
    return replace(run, method=choice, batching=batching, freeze_norms=method in FROZEN_NORMS)


def fit_for(method: str, net: nn.Module) -> nn.Module:
    """The network, with frozen normalisation if the method needs that."""
    return models.freeze_norms(net) if method in FROZEN_NORMS else net


def clients_of(sizes: Sequence[int] = SIZES) -> Partition:
    """Clients with so many samples each, one after another."""
    ends = np.cumsum(sizes)
    return Partition(tuple(np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)))


def images(num: int = sum(SIZES), dtype: torch.dtype = torch.float64, side: int = 8) -> Arrays:
    """Random square images of 10 classes."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(num, 1, side, side, generator=random, dtype=torch.float64).to(dtype)
    return Arrays(x=x, y=torch.randint(0, 10, (num,), generator=random), num_classes=10)


def resnet(norm: str = "batch", dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same tiny residual network at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return models.build("resnet_tiny", width=2, norm=norm).to(dtype)


def simulation(
    method: Method, data: Arrays | None = None, partition: Partition | None = None, **options: Any
) -> Simulation:
    """A simulation on the ragged clients unless told otherwise."""
    options = {"batching": BATCH, "engine": "loop", "seed": SEED, **options}
    return Simulation(method, data or images(), partition or clients_of(), **options)


def run(sim: Simulation, rounds: int = 2) -> State:
    """The state after so many rounds."""
    state = sim.start()
    for _ in range(rounds):
        state = sim.round(state)
    return state


def trained(method: Method, *args: Any, rounds: int = 2, **options: Any) -> dict[str, Tensor]:
    """The trained values, by their names in the unsplit module."""
    return method.model.export(methods.global_model(run(simulation(method, *args, **options), rounds)))


def agree(a: Any, b: Any, tol: float = 1e-12) -> None:
    """The same structure and types, and no number further apart than the tolerance."""
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference between two sets of values."""
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def round_key(number: int) -> int:
    return keys.fold(SEED, "round", number)


def walk(partition: Partition, batching: Batching = BATCH, number: int = 0) -> Walk:
    """The batches of a round."""
    return Walk(batching, partition.clients, round_key(number), {})


def relayed(partition: Partition, rounds: int, batching: Batching = BATCH) -> Iterator[np.ndarray]:
    """The samples of one batch after another as split learning visits them: client by client in a random order."""
    for number in range(rounds):
        batches = walk(partition, batching, number)
        for j in shuffled(range(len(partition)), round_key(number)):
            for step in range(batches.per_round(j)):
                yield batches.samples(j, step)


def interleaved(partition: Partition, rounds: int, batching: Batching = BATCH) -> Iterator[np.ndarray]:
    """The samples of one batch after another as SFL-V2's server sees them: step by step, each in a random order."""
    for number in range(rounds):
        batches = walk(partition, batching, number)
        steps = [batches.per_round(j) for j in range(len(partition))]
        for step in range(max(steps)):
            for j in shuffled([j for j, n in enumerate(steps) if step < n], round_key(number), step):
                yield batches.samples(j, step)


def sgd_by_hand(
    net: nn.Module,
    data: Arrays,
    batches: Iterator[np.ndarray] | Sequence[np.ndarray],
    lr: float,
    momentum: float = 0.0,
    clip: float = torch.inf,
) -> dict[str, Tensor]:
    """Plain PyTorch training of the unsplit module, one batch after another; also changes the module."""
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    net.train()
    for samples in batches:
        batch = data.take(samples)
        opt.zero_grad()
        F.cross_entropy(net(batch.x), batch.y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
    return {name: value.detach() for name, value in net.state_dict().items()}
