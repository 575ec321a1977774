"""Peak memory with 10,000 clients against 200, of which 100 take part in a round.

Both hold the same samples together and take the same number of equal steps, so memory that grows with the number of
clients is all that can tell them apart. Every case is a process of its own; the growth is its peak resident memory
beyond what it had after a round of two clients: everything imported and loaded, the data in memory.
"""

import multiprocessing
import os
import resource
import sys
from typing import NamedTuple

from tables import Row, options, show

# Imports of torch stand inside the functions that a case runs: a process begins with the peak of the one that starts
# it, so the one that starts the others must stay small.

SEED = 0
BAR = 1.2
FEW, MANY = 200, 10_000
PER_ROUND = 100
BATCH, STEPS = 2, 4
NUM_SAMPLES = BATCH * MANY  # a batch for everyone
METHODS = ("sfl_v1", "fedavg")
ENGINES = ("loop", "vmap")
# What is freed goes back to the system at once, so that a peak is what was held and not how free memory was scattered.
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}


class Case(NamedTuple):
    """What one process measures."""

    method: str
    engine: str
    num_clients: int
    rounds: int


class Peak(NamedTuple):
    """Resident memory in MiB."""

    before: float  # after a round of two clients
    after: float  # the most of the whole process


def main() -> None:
    args = options(__doc__.splitlines()[0])
    os.environ |= ALLOCATOR  # glibc reads it when a process starts
    rounds = 2 if args.quick else 20
    show([compare(method, engine, rounds) for method in METHODS for engine in ENGINES], args.json)


def compare(method: str, engine: str, rounds: int) -> Row:
    """Both numbers of clients, each in a fresh process."""
    few, many = (in_own_process(Case(method, engine, n, rounds)) for n in (FEW, MANY))
    ratio = (many.after - many.before) / (few.after - few.before)
    return {
        "method": method,
        "engine": engine,
        f"growth with {FEW}, MiB": few.after - few.before,
        f"growth with {MANY}, MiB": many.after - many.before,
        "ratio": ratio,
        "bar": BAR,
        "met": ratio <= BAR,
        f"peak with {FEW}, MiB": few.after,
        f"peak with {MANY}, MiB": many.after,
        "ratio of peaks": many.after / few.after,
    }


def in_own_process(case: Case) -> Peak:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (case,))


def measure(case: Case) -> Peak:
    """The peak of this process before and after the rounds of a case; a pair of clients warms it up."""
    import torch

    torch.set_num_threads(1)
    train(case._replace(num_clients=2, rounds=1))
    before = peak()
    train(case)
    return Peak(before, peak())


def train(case: Case) -> None:
    import torch

    from cutlayer import Arrays, Batching, Split, iid, methods, models, sgd
    from cutlayer.runs.simulation import Simulation

    torch.manual_seed(SEED)
    x, y = torch.randn(NUM_SAMPLES, 1, 8, 8), torch.randint(0, 10, (NUM_SAMPLES,))
    opt = sgd(0.05, momentum=0.9)
    simulation = Simulation(
        methods.build(case.method, Split(models.cnn(), "conv1"), opt, opt),
        Arrays(x=x, y=y, num_classes=10),
        iid(NUM_SAMPLES, case.num_clients, key=SEED),
        batching=Batching(size=BATCH, steps=STEPS),
        per_round=min(PER_ROUND, case.num_clients),
        engine=case.engine,
        seed=SEED,
    )
    state = simulation.start()
    for _ in range(case.rounds):
        state = simulation.round(state)


def peak() -> float:
    """The most memory that this process has held, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    main()
