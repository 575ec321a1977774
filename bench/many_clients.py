"""A hundred clients on one machine, over gRPC with mutual TLS: seconds and bytes of a round, memory of the server.

Each client has a certificate, a stream and samples of its own; a few processes share them out. The model is tiny, so
that a round is mostly messages. The same rounds on the `loop` engine show how much that is.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from fleet import fleet
from memory import peak
from speed import SEED, distance
from tables import Row, options, show
from torch import Tensor

from cutlayer import Arrays, Batching, iid, methods
from cutlayer.data.sample import Sample
from cutlayer.runs import build
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.rounds import Rounds
from cutlayer.runs.simulation import Simulation

TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Who trains a small network, and how long."""

    clients: int
    processes: int = 4
    batch: int = 8
    steps: int = 5  # in a round
    rounds: int = 10  # after a first one, in which everybody joins

    @property
    def run(self) -> Run:
        return Run(
            clients=self.clients,
            sample=Sample(shape=(64,), classes=10),
            model=Choice("mlp"),
            cut="fc1",
            method=Choice("smofi"),
            optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.9}),
            batching=Batching(size=self.batch, steps=self.steps),
            seed=SEED,
        )


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    # The fewer first: a peak of memory never falls.
    cases = [Case(clients=6, processes=2, rounds=2)] if args.quick else [Case(clients=10), Case(clients=100)]
    show([measure(case) for case in cases], args.json)


def measure(case: Case) -> Row:
    """Rounds over gRPC, then as many on `loop`; their models must agree."""
    torch.manual_seed(SEED)
    num = case.clients * case.batch * 2
    data = Arrays(x=torch.randn(num, 64), y=torch.randint(0, 10, (num,)), num_classes=10)
    partition = iid(num, case.clients, key=SEED)
    shares = [data.take(index) for index in partition.clients]
    method, _ = build.planned_method(case.run, build.model_of(case.run, data), data, case.clients)
    near = Timed(Simulation(method, data, partition, batching=case.run.batching, engine="loop", seed=SEED))
    near.rounds(1 + case.rounds)
    before = peak()
    with fleet(case.run, shares, case.processes) as served:
        far = Timed(served.server.training(case.run).runner)
        far.rounds(1)
        first = served.board.snapshot()
        far.rounds(case.rounds)
        last = served.board.snapshot()
        after = peak()
    difference = distance(near.values(), far.values())
    if not difference <= TOLERANCE:
        raise SystemExit(f"{case.clients} clients: the models are {difference:.1e} apart")
    return {
        "clients": case.clients,
        "processes": case.processes,
        "until all have joined and a round is done, s": far.seconds[0],
        "gRPC, s a round": statistics.median(far.seconds[1:]),
        "loop, s a round": statistics.median(near.seconds[1:]),
        "up, KiB a round": (last.bytes_up - first.bytes_up) / case.rounds / 2**10,
        "down, KiB a round": (last.bytes_down - first.bytes_down) / case.rounds / 2**10,
        "server before, MiB": before,
        "server's peak, MiB": after,
        "difference": difference,
    }


class Timed:
    """Rounds, one way or the other, and the seconds of each."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self._state = rounds, rounds.start()
        self.seconds: list[float] = []

    def rounds(self, number: int) -> None:
        for _ in range(number):
            begin = time.perf_counter()
            self._state = self._rounds.round(self._state)
            self.seconds.append(time.perf_counter() - begin)

    def values(self) -> dict[str, Tensor]:
        return self._rounds.method.model.export(methods.global_model(self._state))


if __name__ == "__main__":
    main()
