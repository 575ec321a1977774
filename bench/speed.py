"""Wall time of whole rounds against the same method written by hand, side by side in one run.

Both sides train on the same batches from the same weights, and their models must agree after the first round, so no
side can be fast by doing something else. Then they take turns, and the ratio is the median over the turns: what slows
the machine for a while slows both.
"""

import copy
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import hand_written
import torch
from hand_written import Client
from tables import Row, options, show
from torch import Tensor, nn

from cutlayer import Arrays, Batching, Partition, Split, dirichlet, iid, load, methods, models, sgd
from cutlayer.core import keys
from cutlayer.core.batches import Walk
from cutlayer.pieces.sampler import Draw, uniform
from cutlayer.runs.simulation import Simulation

THREADS = 2
SEED = 0
LR, MOMENTUM = 0.05, 0.9
TOLERANCE = 1e-5  # between float32 models after a round, which moves them by 1e-2
METHODS = ("sfl_v1", "fedavg")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, where it is cut, and its data."""

    model: nn.Module
    cut: str  # the last unit at the client
    last_child: str  # the child of the model that ends with this unit
    data: Arrays


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison, for each of the methods."""

    name: str
    problem: Problem
    partition: Partition
    batch: int
    per_round: int
    engine: str
    bar: float | None  # the ratio is to be no larger; None: for information
    rounds: int = 1  # in a turn
    turns: int = 15


def main() -> None:
    args = options(__doc__.splitlines()[0])
    torch.set_num_threads(1 if args.quick else THREADS)
    cases = [replace(case, rounds=1, turns=1) for case in all_cases(width=8)] if args.quick else all_cases()
    show([compare(case, method) for case in cases for method in METHODS], args.json)


def all_cases(width: int = 64) -> list[Case]:
    """Client after client, with a large and a small model; then many small clients, whom `auto` may stack."""
    resnet, digits = resnet_problem(width), digits_problem()
    labels = digits.data.y
    equal = {n: iid(len(labels), n, key=SEED) for n in (10, 20, 100)}
    uneven = dirichlet(labels, 100, alpha=0.3, min_size=4, key=SEED)
    pair = iid(len(resnet.data), 2, key=SEED)
    one_by_one = {"engine": "loop", "problem": digits, "per_round": 10, "bar": 1.5}
    many = {"engine": "auto", "problem": digits, "per_round": 20, "batch": 7, "rounds": 4}
    return [
        Case(
            name=f"ResNet-18 of width {width}, 2 clients, batch 32",
            problem=resnet,
            partition=pair,
            batch=32,
            per_round=2,
            engine="loop",
            bar=1.1,
            turns=9,
        ),
        Case(name="digits, 10 equal clients, batch 32", partition=equal[10], batch=32, rounds=4, **one_by_one),
        Case(name="digits, 10 of 20 equal clients, batch 8", partition=equal[20], batch=8, rounds=2, **one_by_one),
        Case(name="digits, 20 of 100 equal clients, batch 7", partition=equal[100], bar=0.5, **many),
        Case(name="digits, 20 of 100 uneven clients, batch 7", partition=uneven, bar=None, **many),
    ]


def resnet_problem(width: int) -> Problem:
    """ResNet-18 for small images, cut after its first stage; the images are noise."""
    torch.manual_seed(SEED)
    images = Arrays(x=torch.randn(128, 3, 32, 32), y=torch.randint(0, 10, (128,)), num_classes=10)
    return Problem(model=models.resnet18(width=width), cut="layer1.1", last_child="layer1", data=images)


def digits_problem() -> Problem:
    """The embedded digits and a small convolutional network, cut after its first convolution."""
    torch.manual_seed(SEED)
    return Problem(model=models.cnn(), cut="conv1", last_child="conv1", data=load("digits").train)


def compare(case: Case, method: str) -> Row:
    """Let both sides take turns, after a first round in which they must agree."""
    ours, theirs = Ours(case, method), ByHand(case, method)
    ours.round()
    theirs.round()
    difference = distance(ours.values(), theirs.values())
    if not difference <= TOLERANCE:
        raise SystemExit(f"{case.name}, {method}: the models are {difference:.1e} apart after a round")
    times = [turn(ours, theirs, case.rounds, swapped=k % 2 == 1) for k in range(case.turns)]
    ratio = statistics.median(mine / other for mine, other in times)
    mine, other = (statistics.median(side) for side in zip(*times, strict=True))
    steps = theirs.num_steps() / case.turns
    return {
        "case": case.name,
        "method": method,
        "engine": ours.engine,
        "by hand, ms a step": 1e3 * other / steps,
        "cutlayer, ms a step": 1e3 * mine / steps,
        "ratio": ratio,
        "bar": case.bar,
        "met": None if case.bar is None else ratio <= case.bar,
        "difference": difference,
    }


def turn(ours: "Ours", theirs: "ByHand", rounds: int, swapped: bool) -> tuple[float, float]:
    """Seconds of both sides for the same rounds; who begins changes from turn to turn."""
    if swapped:
        other = seconds(theirs.round, rounds)
        return seconds(ours.round, rounds), other
    mine = seconds(ours.round, rounds)
    return mine, seconds(theirs.round, rounds)


def seconds(step: Callable[[], None], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - begin


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in b)


class Ours:
    """The method as cutlayer runs it."""

    def __init__(self, case: Case, method: str) -> None:
        problem, opt = case.problem, sgd(LR, momentum=MOMENTUM)
        program = methods.build(method, Split(problem.model, problem.cut), opt, opt)
        self._asked = case.engine
        self._simulation = Simulation(
            program,
            problem.data,
            case.partition,
            batching=Batching(size=case.batch),
            per_round=case.per_round,
            engine=case.engine,
            seed=SEED,
        )
        self._state = self._simulation.start()

    def round(self) -> None:
        self._state = self._simulation.round(self._state)

    def values(self) -> dict[str, Tensor]:
        return self._simulation.method.model.export(methods.global_model(self._state))

    @property
    def engine(self) -> str:
        used = self._simulation.engine_name
        return used if used == self._asked else f"{self._asked}: {used}"


class ByHand:
    """The method as `hand_written` runs it, on batches that were drawn beforehand."""

    def __init__(self, case: Case, method: str) -> None:
        problem, data = case.problem, case.problem.data
        self._lower, self._upper = hand_written.cut(copy.deepcopy(problem.model), problem.last_child)
        self._whole = nn.Sequential(OrderedDict([*self._lower.named_children(), *self._upper.named_children()]))
        self._method = method
        self._job = hand_written.Training(data.x, data.y, LR, MOMENTUM)
        self._plans = [plan(case, number) for number in range(1 + case.turns * case.rounds)]
        self._next = iter(self._plans)

    def round(self) -> None:
        clients = next(self._next)
        if self._method == "fedavg":
            hand_written.fedavg_round(self._whole, clients, self._job)
        else:
            hand_written.sfl_v1_round(self._lower, self._upper, clients, self._job)

    def values(self) -> dict[str, Tensor]:
        return self._whole.state_dict()

    def num_steps(self) -> int:
        """Of all clients together, in all rounds but the first."""
        return sum(len(client.batches) for clients in self._plans[1:] for client in clients)


def plan(case: Case, number: int) -> list[Client]:
    """The clients and batches that cutlayer draws for this round."""
    key = keys.fold(SEED, "round", number)
    walk = Walk(Batching(size=case.batch), case.partition.clients, key, {})
    chosen = uniform(Draw(dict(enumerate(case.partition.sizes.tolist())), case.per_round, key))
    return [
        Client(
            num_samples=len(case.partition.clients[j]),
            batches=[torch.from_numpy(walk.samples(j, step)) for step in range(walk.per_round(j))],
        )
        for j in chosen
    ]


if __name__ == "__main__":
    main()
