"""A step of SMoFi on clients in processes of their own, over gRPC with mutual TLS, against the loop engine.

Both sides train the same model on the same batches and take turns, one round each. On `loop` one process computes
everything with two threads. Over gRPC the server computes with two threads and each client with one: clients and server
work one after the other, so two cores are all that either side has. A step is one mini-batch of every client, and is
timed from the end of the step before to its own end; the first and the last step of a round are left out.
"""

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from fleet import Fleet, fleet
from fusion import Watched, in_turn, inner_steps, noise
from speed import SEED, THREADS, distance
from tables import Row, options, show
from torch import Tensor

from cutlayer import Batching, iid, methods
from cutlayer.data.sample import Sample
from cutlayer.runs import build
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.simulation import Simulation

BAR = 1.5
TOLERANCE = 1e-5  # between the models after a round


@dataclass(frozen=True, kw_only=True)
class Case:
    """ResNet-18 of this width for 32x32 images, cut after its first stage, and who trains it."""

    width: int = 64
    clients: int = 4
    batch: int = 32
    steps: int = 4  # in a round
    turns: int = 3

    @property
    def name(self) -> str:
        return f"ResNet-18 of width {self.width}, {self.clients} clients, batch {self.batch}"

    @property
    def run(self) -> Run:
        return Run(
            clients=self.clients,
            sample=Sample(shape=(3, 32, 32), classes=10),
            model=Choice("resnet18", {"width": self.width}),
            cut="layer1.1",
            method=Choice("smofi"),
            optimiser=Choice("sgd", {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}),
            batching=Batching(size=self.batch, steps=self.steps),
            seed=SEED,
        )


QUICK = Case(width=4, clients=2, batch=4, steps=4, turns=1)


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(1 if args.quick else THREADS)
    show([compare(QUICK if args.quick else Case())], args.json)


def compare(case: Case) -> Row:
    """Let both sides take turns, after a first round in which they must agree."""
    torch.manual_seed(SEED)
    data = noise(case.clients * case.batch)
    partition = iid(len(data), case.clients, key=SEED)
    shares = [data.take(index) for index in partition.clients]
    method, _ = build.planned_method(case.run, build.model_of(case.run, data), data, case.clients)
    with fleet(case.run, shares, case.clients) as served:
        near = Side(method, lambda m: Simulation(
            m, data, partition, batching=case.run.batching, engine="loop", seed=SEED))  # fmt: skip
        far = Side(served.server.method, lambda m: _deployed(served, m, case.run))
        difference = parted(near, far)
        if not difference <= TOLERANCE:
            raise SystemExit(f"{case.name}: the models are {difference:.1e} apart after a round")
        before = traffic(served)
        turns = [in_turn(near.turn, far.turn, swapped=k % 2 == 1) for k in range(case.turns)]
        moved = (traffic(served) - before) / (case.turns * case.steps)
    loop, grpc = (1e3 * statistics.median(side) for side in zip(*turns, strict=True))
    ratio = statistics.median(slow / fast for fast, slow in turns)
    return {
        "case": case.name,
        "loop, ms a step": loop,
        "gRPC, ms a step": grpc,
        "ratio": ratio,
        "bar": BAR,
        "met": ratio <= BAR,
        "MiB a step": moved / 2**20,
        "difference": difference,
    }


def parted(near: "Side", far: "Side") -> float:
    """How far the models are apart after a first round of both, on one thread: with more, torch rounds otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    near.turn()
    far.turn()
    torch.set_num_threads(threads)
    return distance(near.values(), far.values())


def _deployed(served: Fleet, method: Any, run: Run) -> Rounds:
    served.server.method = method
    return served.server.training(run).runner


def traffic(served: Fleet) -> int:
    """Bytes that went and came so far."""
    status = served.board.snapshot()
    return status.bytes_up + status.bytes_down


class Side:
    """One of the two ways to run the method, and when its steps ended."""

    def __init__(self, method: Any, rounds: Any) -> None:
        self._ends: list[float] = []
        self._rounds: Rounds = rounds(replace(method, fuse=Watched(method.fuse, self._ends)))
        self._state = self._rounds.start()

    def turn(self) -> float:
        """Seconds of a step, the median over a round's inner steps."""
        self._ends.clear()
        self._state = self._rounds.round(self._state)
        return statistics.median(inner_steps(self._ends))

    def values(self) -> dict[str, Tensor]:
        return self._rounds.method.model.export(methods.global_model(self._state))


if __name__ == "__main__":
    main()
