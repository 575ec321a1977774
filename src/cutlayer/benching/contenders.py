"""What takes turns in the benchmark, and cutlayer's engines among them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from cutlayer.benching.cases import BenchProblem
from cutlayer.engines.graph.engine import Graph
from cutlayer.errors import ConfigError
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.training import Training

log = logging.getLogger("cutlayer")


class MemoryUse(NamedTuple):
    """Bytes of the device beyond the model and the samples that all rows share; None where nobody counts them."""

    allocated: int | None = None
    reserved: int | None = None


class Contender(Protocol):
    """Does the same work in every turn; what it has begun on a device may still run when a turn returns."""

    def turn(self) -> int:
        """Take some steps; how many, counting each client's."""
        ...

    def loss(self) -> float | None:
        """The mean batch loss of the last turn, where it is one of the method's."""
        ...

    def memory(self) -> MemoryUse | None:
        """The most so far, where torch's allocator does not know."""
        ...


class OnEngine:
    """An engine of cutlayer as in a long run: a turn is a round; end to end, with evaluation."""

    def __init__(self, problem: BenchProblem, engine: str) -> None:
        if engine == "graph" and torch.device(problem.case.device).type != "cuda":
            raise ConfigError(f"the engine graph needs a GPU, and this is on the {problem.case.device}")
        self.engine = engine
        self.told: list[str] = []  # warnings
        with hearing(self.told):
            self.simulation = simulated(problem, engine)
        made = self.simulation.backend.engine
        if isinstance(made, Graph):
            made.compile_at_once()
        whole = problem.case.end_to_end
        self.training = Training(runner=self.simulation, test=problem.test) if whole else None
        self.state = self.simulation.start()

    def turn(self) -> int:
        before = self.simulation.ledger.samples
        with hearing(self.told):
            if self.training is None:
                self.state = self.simulation.round(self.state)
            else:
                self.training.round()
                self.state = self.training.state
        engine, used = self.simulation.backend.engine, self.simulation.engine_name
        halved = isinstance(engine, Graph) and engine.slots < (self.simulation.per_round or 0)
        if used != self.engine or halved:
            raise ConfigError("; ".join(self.told) or f"the simulation chose the engine {used}")
        return (self.simulation.ledger.samples - before) // self.simulation.batching.size

    def loss(self) -> float | None:
        total, batches, _ = self.state.report.tree
        return float(total / batches)

    def memory(self) -> MemoryUse | None:
        return None


def simulated(problem: BenchProblem, engine: str) -> Simulation:
    """The case as a simulation."""
    case = problem.case
    return Simulation(
        problem.method(),
        problem.data,
        problem.partition,
        batching=problem.batching,
        per_round=case.clients,
        engine=engine,
        precision=case.precision,
        seed=case.seed,
    )


@contextmanager
def hearing(told: list[str]) -> Iterator[None]:
    """Collect the warnings of cutlayer, such as why it takes another engine than the one asked for."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
