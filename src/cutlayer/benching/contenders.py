"""The rows of the benchmark: what each of them must do, and cutlayer's engines among them."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from cutlayer.benching.cases import BenchProblem
from cutlayer.engines.graph.engine import Graph
from cutlayer.errors import ConfigError
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.training import Training

log = logging.getLogger("cutlayer")


class MemoryUse(NamedTuple):
    """Bytes on the device beyond the model and the samples that all rows share; None where they are not counted."""

    allocated: int | None = None
    reserved: int | None = None


class Contender(ABC):
    """Does the same work in every turn; work that it has queued on a device may still run when a turn returns."""

    @abstractmethod
    def turn(self) -> int:
        """Take some steps and return their number, summed over the clients."""

    def loss(self) -> float | None:
        """Return the mean batch loss of the last turn, if it is the loss of the method."""
        return None

    def memory(self) -> MemoryUse | None:
        """Return the peak so far, or None if torch's allocator knows it."""
        return None


class OnEngine(Contender):
    """An engine of cutlayer as in a long run: a turn is a round; end to end, with evaluation."""

    def __init__(self, problem: BenchProblem, engine: str) -> None:
        case = problem.case
        if engine == "graph" and torch.device(case.device).type != "cuda":
            raise ConfigError(f"the engine graph needs a GPU, and this is on the {case.device}")
        self.engine = engine
        self.warnings: list[str] = []
        with hearing(self.warnings):
            self.simulation = Simulation(
                problem.method(),
                problem.data,
                problem.partition,
                batching=problem.batching,
                per_round=case.clients,
                engine=engine,
                precision=case.precision,
                seed=case.seed,
            )
        made = self.simulation.backend.engine
        if isinstance(made, Graph):
            made.compile_at_once()
        self.training = Training(runner=self.simulation, test=problem.test) if case.end_to_end else None
        self.state = self.simulation.start()

    def turn(self) -> int:
        before = self.simulation.ledger.samples
        with hearing(self.warnings):
            if self.training is None:
                self.state = self.simulation.round(self.state)
            else:
                self.training.round()
                self.state = self.training.state
        engine, used = self.simulation.backend.engine, self.simulation.engine_name
        halved = isinstance(engine, Graph) and engine.slots < (self.simulation.per_round or 0)
        if used != self.engine or halved:
            raise ConfigError("; ".join(self.warnings) or f"the simulation chose the engine {used}")
        return (self.simulation.ledger.samples - before) // self.simulation.batching.size

    def loss(self) -> float | None:
        total, batches, _ = self.state.report.tree
        return float(total / batches)


@contextmanager
def hearing(warnings: list[str]) -> Iterator[None]:
    """Collect cutlayer's warnings, such as why it uses another engine than the one asked for."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
