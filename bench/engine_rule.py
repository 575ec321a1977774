"""How near the rule of `auto` comes to the faster engine on a CPU: loop and vmap take turns on twelve problems.

The rule never measures time, so that the same command always trains on the same engine. What that costs is measured
here: the time of the engine that it chooses over the time of the faster one, the median over alternating turns.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from tables import Row, options, show
from torch import nn

from cutlayer import Arrays, Batching, Split, from_arrays, iid, methods, models, sgd
from cutlayer.runs.simulation import Simulation

THREADS = 2
BAR = 1.15
STEPS = 4  # in a round
TURNS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Clients with equally many samples of this shape, and a model of them."""

    name: str
    shape: tuple[int, ...]
    model: Callable[[], nn.Module]
    batch: int
    clients: int


def convolutions(channels: int, side: int) -> Callable[[], nn.Module]:
    return lambda: models.cnn(in_channels=channels, image_size=side, num_classes=10)


def dense(*widths: int) -> Callable[[], nn.Module]:
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return lambda: nn.Sequential(*layers[:-1])


CASES = [
    Case(name="cnn 8x8", shape=(1, 8, 8), model=convolutions(1, 8), batch=32, clients=10),
    Case(name="cnn 8x8", shape=(1, 8, 8), model=convolutions(1, 8), batch=8, clients=100),
    Case(name="cnn 3x16x16", shape=(3, 16, 16), model=convolutions(3, 16), batch=16, clients=20),
    Case(name="cnn 28x28", shape=(1, 28, 28), model=convolutions(1, 28), batch=8, clients=20),
    Case(name="cnn 28x28", shape=(1, 28, 28), model=convolutions(1, 28), batch=32, clients=10),
    Case(name="cnn 28x28", shape=(1, 28, 28), model=convolutions(1, 28), batch=32, clients=50),
    Case(name="cnn 3x32x32", shape=(3, 32, 32), model=convolutions(3, 32), batch=32, clients=10),
    Case(name="dense 64-64-10", shape=(64,), model=dense(64, 64, 10), batch=32, clients=10),
    Case(name="dense 784-64-10", shape=(784,), model=dense(784, 64, 10), batch=8, clients=20),
    Case(name="dense 784-64-10", shape=(784,), model=dense(784, 64, 10), batch=32, clients=50),
    Case(name="dense 784-1024-1024-10", shape=(784,), model=dense(784, 1024, 1024, 10), batch=32, clients=20),
    Case(
        name="ResNet-18",
        shape=(3, 32, 32),
        model=lambda: models.resnet18(in_channels=3, num_classes=10),
        batch=8,
        clients=4,
    ),
]


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(THREADS)
    show([measured(case, turns=1 if args.quick else TURNS) for case in CASES[: 2 if args.quick else None]], args.json)


def measured(case: Case, turns: int) -> Row:
    data = samples(case)
    torch.manual_seed(0)
    net = case.model()
    sides = {engine: simulation(case, net, data, engine) for engine in ("loop", "vmap")}
    chosen = simulation(case, net, data, "auto").engine_name
    states = {engine: sim.round(sim.start()) for engine, sim in sides.items()}  # warm-up
    seconds: dict[str, list[float]] = {engine: [] for engine in sides}
    for _ in range(turns):
        for engine, sim in sides.items():
            begin = time.perf_counter()
            states[engine] = sim.round(states[engine])
            seconds[engine].append(time.perf_counter() - begin)
    ms = {engine: 1e3 * statistics.median(found) / STEPS for engine, found in seconds.items()}
    ratio = ms[chosen] / min(ms.values())
    return {
        "model": case.name,
        "clients": case.clients,
        "batch": case.batch,
        "loop, ms a step": ms["loop"],
        "vmap, ms a step": ms["vmap"],
        "auto": chosen,
        "over the faster": ratio,
        "bar": BAR,
        "met": ratio <= BAR,
    }


def samples(case: Case) -> Arrays:
    random = torch.Generator().manual_seed(0)
    num = case.batch * case.clients * 2
    x = torch.randn(num, *case.shape, generator=random)
    return from_arrays(x, torch.randint(10, (num,), generator=random), num_classes=10)


def simulation(case: Case, net: nn.Module, data: Arrays, engine: str) -> Simulation:
    opt = sgd(0.01, momentum=0.9)
    method = methods.sfl_v1(model=Split(net, 1), client_opt=opt, server_opt=opt)
    partition, batching = iid(len(data), case.clients, key=0), Batching(size=case.batch, steps=STEPS)
    return Simulation(method, data, partition, batching=batching, engine=engine)


if __name__ == "__main__":
    main()
