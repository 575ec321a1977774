"""What SMoFi's fusion of the server-side momenta costs: its step against the same step of SFL-V1.

Both methods train the same model on the same batches and take turns, one round each; without a global momentum the
fusion is all that sets them apart. A step is one mini-batch of every client, and is timed from the end of the step
before to its own end. The first and the last step of a round are left out: one holds the round's beginning, and after
the other nobody goes on from the fused momentum.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from speed import SEED, THREADS, distance
from tables import Row, options, show
from torch import Tensor

from cutlayer import Arrays, Batching, Split, iid, methods, models, sgd
from cutlayer.pieces.fuse import Fuse
from cutlayer.runs.simulation import Simulation

BAR = 1.1
LR, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
FUSION = {"alpha": -0.1, "beta": 0.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """ResNet-18 of this width for 32x32 images, cut after its first stage, and who trains it."""

    width: int = 64
    clients: int = 20
    batch: int = 32
    steps: int = 4  # in a round
    turns: int = 3

    @property
    def name(self) -> str:
        return f"ResNet-18 of width {self.width}, {self.clients} clients, batch {self.batch}"


QUICK = Case(width=4, clients=3, batch=4, steps=4, turns=1)


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(1 if args.quick else THREADS)
    show([compare(QUICK if args.quick else Case(), "smofi", **FUSION)], args.json)


def compare(case: Case, method: str, **settings: Any) -> Row:
    """Let SFL-V1 and the method that fuses take turns, after a first round in which they must part."""
    plain, fusing = Side(case, "sfl_v1"), Side(case, method, **settings)
    plain.turn()
    fusing.turn()
    difference = distance(plain.values(), fusing.values())
    if not difference > 0:
        raise SystemExit(f"{case.name}: the models of sfl_v1 and {method} do not differ, so nothing was fused")
    turns = [in_turn(plain.turn, fusing.turn, swapped=k % 2 == 1) for k in range(case.turns)]
    before, after = (1e3 * statistics.median(side) for side in zip(*turns, strict=True))
    ratio = statistics.median(slow / fast for fast, slow in turns)
    return {
        "case": case.name,
        "sfl_v1, ms a step": before,
        f"{method}, ms a step": after,
        "ratio": ratio,
        "bar": BAR,
        "met": ratio <= BAR,
        "difference": difference,
    }


def in_turn(one: Callable[[], float], other: Callable[[], float], swapped: bool) -> tuple[float, float]:
    """What both say, in this order; who begins changes from turn to turn."""
    if swapped:
        second = other()
        return one(), second
    return one(), other()


@dataclass(frozen=True)
class Watched:
    """A fuse that also notes when it ends, which is when the step ends."""

    fuse: Fuse
    ends: list[float]

    @property
    def barrier(self) -> Any:
        return self.fuse.barrier

    def __call__(self, *args: Any) -> None:
        self.fuse(*args)
        self.ends.append(time.perf_counter())


class Side:
    """One of the two methods, and when its steps ended."""

    def __init__(self, case: Case, method: str, **settings: Any) -> None:
        torch.manual_seed(SEED)
        split = Split(models.resnet18(width=case.width), "layer1.1")
        data = noise(case.clients * case.batch)
        opt = sgd(LR, momentum=MOMENTUM, weight_decay=DECAY)
        program = methods.build(method, split, opt, opt, **settings)
        self._ends: list[float] = []
        self._simulation = Simulation(
            replace(program, fuse=Watched(program.fuse, self._ends)),
            data,
            iid(len(data), case.clients, key=SEED),
            batching=Batching(size=case.batch, steps=case.steps),
            engine="loop",
            seed=SEED,
        )
        self._state = self._simulation.start()

    def turn(self) -> float:
        """Seconds of a step, the median over a round's inner steps."""
        self._ends.clear()
        self._state = self._simulation.round(self._state)
        return statistics.median(inner_steps(self._ends))

    def values(self) -> dict[str, Tensor]:
        return self._simulation.method.model.export(methods.global_model(self._state))


def noise(num: int) -> Arrays:
    return Arrays(x=torch.randn(num, 3, 32, 32), y=torch.randint(0, 10, (num,)), num_classes=10)


def inner_steps(ends: list[float]) -> list[float]:
    """Seconds of every step but the first and the last, from when the steps ended."""
    return [end - begin for begin, end in pairwise(ends[:-1])]


if __name__ == "__main__":
    main()
