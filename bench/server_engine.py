"""The server's share of a round with 20 devices, on `loop`, on `vmap` and, with `--device cuda`, on `graph`.

Devices are clients in other processes, over gRPC with mutual TLS. The engines serve the same devices and take turns,
one round of SFL-V1 each. The server's share is the time inside its engine: the forward and backward passes of the
server's parts, their updates and the means. Messages and waiting for devices are the rest of the round.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from fleet import Fleet, fleet
from speed import SEED, distance
from tables import Row, options, show

from cutlayer import Arrays, Batching, iid, methods
from cutlayer.core.engine import Engine
from cutlayer.data.sample import Sample
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Cuda
from cutlayer.engines.loop import Loop
from cutlayer.engines.vmap import Vmap
from cutlayer.runs.config import Choice, Run

TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Devices with equally many samples of this shape, and the model that they train."""

    name: str
    shape: tuple[int, ...]
    model: Choice
    cut: str
    clients: int = 20
    batch: int = 8
    steps: int = 5  # in a round
    turns: int = 7
    device: str = "cpu"  # of the server

    @property
    def run(self) -> Run:
        return Run(
            clients=self.clients,
            sample=Sample(shape=self.shape, classes=10),
            model=self.model,
            cut=self.cut,
            method=Choice("sfl_v1"),
            optimiser=Choice("sgd", {"lr": 0.05, "momentum": 0.9}),
            batching=Batching(size=self.batch, steps=self.steps),
            device=self.device,
            seed=SEED,
        )

    def engines(self) -> dict[str, Engine]:
        stacking: dict[str, Engine] = {"loop": Loop(), "vmap": Vmap()}
        if self.device == "cpu":
            return stacking
        return {**stacking, "graph": Graph(Cuda(torch.device(self.device)), self.clients)}


CASES = [
    Case(name="mlp 64", shape=(64,), model=Choice("mlp"), cut="fc1"),
    Case(name="cnn 8x8", shape=(1, 8, 8), model=Choice("cnn"), cut="conv1"),
]


class TimedEngine:
    """An engine that adds up the seconds spent in its methods."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.seconds = engine, 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._engine, name)
        return self._timed(found) if callable(found) else found

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # or the time of its kernels would fall on whoever waits for them
                self.seconds += time.perf_counter() - begin

        return call


class Side:
    """Rounds with the devices on one server engine."""

    def __init__(self, served: Fleet, run: Run, engine: Engine) -> None:
        self._rounds = served.server.training(run).runner
        self._timed = self._rounds.backend.engine = TimedEngine(engine)
        self._state = self._rounds.start()

    def turn(self) -> tuple[float, float]:
        """Run a round; return its seconds, and those inside the server's engine."""
        self._timed.seconds, begin = 0.0, time.perf_counter()
        self._state = self._rounds.round(self._state)
        return time.perf_counter() - begin, self._timed.seconds

    def values(self) -> dict[str, torch.Tensor]:
        return self._rounds.method.model.export(methods.global_model(self._state))


def main() -> None:
    args = options(__doc__.splitlines()[0], ("--device", {"default": "cpu", "help": "of the server: cpu or cuda"}))
    torch.set_num_threads(1)
    cases = [Case(name="mlp 64", shape=(64,), model=Choice("mlp"), cut="fc1", clients=4, turns=1)]
    chosen = [replace(case, device=args.device) for case in (cases if args.quick else CASES)]
    show([row for case in chosen for row in measured(case)], args.json)


def measured(case: Case) -> list[Row]:
    torch.manual_seed(SEED)
    num = case.clients * case.batch * 2
    data = Arrays(x=torch.randn(num, *case.shape), y=torch.randint(0, 10, (num,)), num_classes=10)
    shares = [data.take(index) for index in iid(num, case.clients, key=SEED).clients]
    with fleet(case.run, shares, processes=2) as served:
        sides = {name: Side(served, case.run, engine) for name, engine in case.engines().items()}
        for side in sides.values():
            side.turn()
        difference = max(distance(sides["loop"].values(), side.values()) for side in sides.values())
        if not difference <= TOLERANCE:
            raise SystemExit(f"{case.name}: the models are {difference:.1e} apart after a round")
        turns = [{name: side.turn() for name, side in sides.items()} for _ in range(case.turns)]
    rows = []
    for name in sides:
        total, own = (statistics.median(turn[name][k] for turn in turns) for k in (0, 1))
        rows.append(
            {
                "model": case.name,
                "devices": case.clients,
                "engine": name,
                "round, ms": 1e3 * total,
                "server's engine, ms": 1e3 * own,
                "share": statistics.median(turn[name][1] / turn[name][0] for turn in turns),
                "loop's time over it": statistics.median(turn["loop"][1] / turn[name][1] for turn in turns),
                "difference": difference,
            }
        )
    return rows


if __name__ == "__main__":
    main()
