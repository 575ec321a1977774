"""Specifies that whatever a program computes, recordings show what the loop engine shows: programs drawn at random.

A program is played many times, so that its chains are recorded, and now and then another one comes between.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from test_graph_memory import Scaled, played
from torch import Tensor

from cutlayer.core.engine import Engine
from cutlayer.core.state import Grads
from cutlayer.core.values import Block, PerClient, shared
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.loop import Loop

CPU = torch.device("cpu")
IDS = (0, 1, 2)
WEIGHTS = {0: 0.5, 1: 0.25, 2: 0.25}
PLAYS = 12
OTHER_EVERY = 5
OTHER = 1000  # what the seed of the other program is more


def mixed(a: Tensor, b: Tensor) -> Tensor:
    return a - 2 * b


def crossed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return b, a


def part_of(a: Tensor) -> Scaled:
    return Scaled({"w": a})


def moved(part: Scaled, by: Tensor) -> Scaled:
    return Scaled({"w": part.params["w"] + by / 8})


def same(part: Scaled) -> Scaled:
    return part


def parameter(part: Scaled) -> Tensor:
    return part.params["w"] * 1


def forward(part: Scaled, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return part.params["w"] * x + x.sin(), {}


def slopes(grads: Grads) -> tuple[Tensor, Tensor | None]:
    return grads.params["w"], grads.cut


@dataclass
class Stage:
    """The values of a program under way, and what it showed."""

    engine: Engine
    random: Random
    values: list[PerClient]
    parts: list[PerClient] = field(default_factory=list)
    pulls: list[PerClient] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)

    def any(self) -> PerClient:
        return self.random.choice(self.values)

    def part(self) -> PerClient:
        return self.random.choice(self.parts)

    def call(self, fn: Callable[..., Any], *args: PerClient) -> PerClient:
        return of(self.engine.call(fn, args, IDS))

    def show(self, value: Any) -> None:
        self.shown += self.engine.real(value).tolist()


def of(blocks: list[Block]) -> PerClient:
    return PerClient("clients", blocks)


def mix(s: Stage) -> None:
    s.values.append(s.call(mixed, s.any(), s.any()))


def cross(s: Stage) -> None:
    both = s.call(crossed, s.any(), s.any())
    s.values += [of([Block((j,), both.at(j)[k], stacked=False) for j in IDS]) for k in (0, 1)]


def move(s: Stage) -> None:
    s.parts.append(s.call(moved, s.part(), s.any()))


def pass_on(s: Stage) -> None:
    s.parts.append(s.call(same, s.part()))


def look_inside(s: Stage) -> None:
    s.values.append(s.call(parameter, s.part()))


def show(s: Stage) -> None:
    s.show(s.any().at(s.random.choice(IDS)))


def let_go(s: Stage) -> None:
    held = s.random.choice((s.values, s.parts))
    if len(held) > 1:
        held.pop(s.random.randrange(len(held)))


def go_forward(s: Stage) -> None:
    made = s.engine.vjp(forward, (s.part(), s.any()), IDS, cut=1)
    s.values.append(of([b._replace(tree=b.tree[0]) for b in made]))
    s.pulls.append(of([b._replace(tree=b.tree[1]) for b in made]))


def go_back(s: Stage) -> None:
    if s.pulls:
        pull = s.pulls.pop(s.random.randrange(len(s.pulls)))
        both = s.call(slopes, of(s.engine.pull(pull, s.any())))
        s.values += [of([Block((j,), both.at(j)[k], stacked=False) for j in IDS]) for k in (0, 1)]


def combine(s: Stage) -> None:
    mean = s.engine.combine(s.any(), WEIGHTS, True)
    s.values.append(s.call(mixed, s.any(), shared("clients", IDS, mean)))


def meet(s: Stage) -> None:
    one, other = (s.any().at(s.random.choice(IDS)) for _ in range(2))
    s.show(s.engine.once(mixed, [one, other]))


def run_what_waits(s: Stage) -> None:
    if isinstance(s.engine, Graph):
        s.engine._flush()


MOVES = (
    *(mix, cross, move, pass_on, look_inside, show, let_go, let_go, go_forward, go_back),
    *(combine, meet, run_what_waits),
)


def program(seed: int, engine: Engine) -> Iterator[list[float]]:
    """What is shown in each play; the last value of one is there in the next, where it lies or as a copy."""
    left: list[PerClient] = []
    for play in range(PLAYS):
        random = Random(seed + OTHER * (play % OTHER_EVERY == OTHER_EVERY - 1))
        first = torch.tensor([float(play), 1.0], dtype=torch.float64)
        s = Stage(engine, random, [of([Block((j,), first + j, stacked=False) for j in IDS]), *left])
        s.parts.append(s.call(part_of, s.values[0]))
        for _ in range(random.randint(4, 20)):
            random.choice(MOVES)(s)
        last = s.call(torch.tanh, s.values[-1])
        copies = of([Block((j,), engine.real(last.at(j)), stacked=False) for j in IDS])
        left = [last if random.random() < 0.5 else copies]
        for j in IDS:
            for value in (*s.values, *(s.call(parameter, part) for part in s.parts)):
                s.show(value.at(j))
        yield s.shown


def recordings(seed: int, slots: int) -> int:
    """How many there are in the end of a program that shows the same on both engines."""
    engine = Graph(Again(CPU), slots)
    with torch.no_grad():
        found = played(lambda engine: program(seed, engine), engine)
        for shown, expected in zip(found, program(seed, Loop()), strict=True):
            assert shown == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True), seed
    assert not engine.refused
    return engine.num_recordings


@pytest.mark.parametrize("slots", (1, 2, 3))
def test_recordings_show_what_the_loop_engine_shows(slots: int) -> None:
    assert sum(recordings(seed, slots) for seed in range(15)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("slots", (1, 2, 3))
def test_recordings_show_what_the_loop_engine_shows_in_many_programs(slots: int) -> None:
    assert sum(recordings(seed, slots) for seed in range(15, 300)) > 1000
