"""What it costs that devices check each command against their own copy of the method: rounds with it and without.

The runs are those of `devices.py` and `many_clients.py`. Two servers with the same clients play one round each in turn.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from devices import QUICK
from devices import Case as Large
from fleet import fleet
from many_clients import Case as Small
from many_clients import Timed
from speed import SEED, THREADS
from tables import Row, options, show

from cutlayer import Arrays, iid
from cutlayer.data.sample import Sample
from cutlayer.runs.config import Run

TURNS = 9


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(1 if args.quick else THREADS)
    large, small = (QUICK, Small(clients=4, processes=2)) if args.quick else (Large(), Small(clients=100))
    turns = 1 if args.quick else TURNS
    rows = [
        compare("devices.py", large.run, large.batch, large.clients, turns, 0.03),
        compare("many_clients.py", small.run, 2 * small.batch, small.processes, turns, 0.10),
    ]
    show(rows, args.json)


def compare(name: str, run: Run, samples: int, processes: int, turns: int, bar: float) -> Row:
    """Play rounds with clients that trust their server, and with clients that do not, in turns."""
    shares = noise(run, samples)
    with ExitStack() as stack:
        sides = [stack.enter_context(fleet(run, shares, processes, trusting=trusting)) for trusting in (True, False)]
        timed = [Timed(side.server.training(run).runner) for side in sides]
        for side in timed:
            side.rounds(2)  # in the first everybody joins
        for turn in range(turns):
            for side in timed if turn % 2 else reversed(timed):
                side.rounds(1)
    trusting, checked = ([*side.seconds[2:]] for side in timed)
    cost = statistics.median(b / a for a, b in zip(trusting, checked, strict=True)) - 1
    return {
        "run": name,
        "trusting, s a round": statistics.median(trusting),
        "checked, s a round": statistics.median(checked),
        "cost, %": 100 * cost,
        "bar, %": 100 * bar,
        "met": cost <= bar,
    }


def noise(run: Run, samples: int) -> Sequence[Any]:
    """Random samples for each client of a run."""
    assert isinstance(run.sample, Sample)
    torch.manual_seed(SEED)
    num = run.clients * samples
    data = Arrays(x=torch.randn(num, *run.sample.shape), y=torch.randint(0, 10, (num,)), num_classes=10)
    return [data.take(index) for index in iid(num, run.clients, key=SEED).clients]


if __name__ == "__main__":
    main()
