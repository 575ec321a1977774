"""Specifies that memory reuse by recordings never shows: each value stays as it was computed.

Every scene runs on the loop engine and on recordings, long enough for every chain to be recorded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.engine import Engine
from cutlayer.core.values import Block, PerClient, shared
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.lane import NotKept
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.loop import Loop

CPU = torch.device("cpu")
BOTH = (0, 1)
Scene = Callable[[Engine], Iterator[Any]]


class Counted(NamedTuple):
    """A value with a counter."""

    value: Tensor
    count: Tensor


def rows(*values: Any) -> PerClient:
    return PerClient("server", [Block(BOTH, tree.map(lambda *a: torch.stack(a), *values), stacked=True)])


def each(engine: Engine, fn: Any, *values: PerClient) -> PerClient:
    return PerClient("server", engine.call(fn, values, BOTH))


def seen(engine: Engine, value: PerClient) -> list[Any]:
    return [tree.map(lambda a: a.tolist(), engine.real(value.at(j))) for j in BOTH]


def plus_one(a: Tensor) -> Tensor:
    return a + 1


def tenfold(a: Tensor) -> Tensor:
    return a * 10


def later(counted: Counted) -> Counted:
    return Counted(counted.value + 1, counted.count + 1)


def pair(a: Tensor) -> tuple[Tensor, Tensor]:
    return a + 1, a + 2


def digits(two: tuple[Tensor, Tensor], b: Tensor) -> Tensor:
    return two[0] * 100 + two[1] * 10 + b


def start(engine: Engine) -> PerClient:
    begun = each(engine, plus_one, rows(torch.tensor([1.0]), torch.tensor([2.0])))
    seen(engine, begun)  # from here on it is what an earlier chain left
    return begun


def same_functions_on_other_values(engine: Engine) -> Iterator[Any]:
    for k in range(8):
        c = start(engine)
        p = each(engine, plus_one, c)
        yield seen(engine, each(engine, tenfold, c if k < 4 else p))


def shared_value_or_plain_number(engine: Engine) -> Iterator[Any]:
    for k in range(8):
        c = start(engine)
        factor = shared("server", BOTH, torch.tensor(5.0) + k if k < 4 else 1)
        yield seen(engine, each(engine, torch.mul, c, factor))


def numbers_of_several_types(engine: Engine) -> Iterator[Any]:
    for number in (1, 1, 1, 1.0, 1.0, True, True):
        yield seen(engine, each(engine, partial(torch.mul, other=number), start(engine)))


def shared_value_that_is_let_go(engine: Engine) -> Iterator[Any]:
    for _ in range(5):
        c = start(engine)
        total = engine.combine(c, {0: 1.0, 1: 1.0}, True)
        waiting = each(engine, torch.add, c, shared("server", BOTH, total))
        del total
        each(engine, torch.add, c, shared("server", BOTH, torch.tensor([100.0])))
        yield seen(engine, waiting)


def transposed_in_place(engine: Engine) -> Iterator[Any]:
    c = each(engine, plus_one, rows(torch.arange(4.0).reshape(2, 2), torch.arange(4.0).reshape(2, 2)))
    for _ in range(6):
        c = each(engine, torch.t, c)
        yield seen(engine, c)


def one_value_of_several_clients(engine: Engine) -> Iterator[Any]:
    c = start(engine)
    for _ in range(5):
        c = each(engine, plus_one, c)
        both = PerClient("server", [Block(BOTH, c.at(0), stacked=False)])
        yield engine.real(engine.combine(both, {0: 0.5, 1: 0.5}, True)).tolist()


def means_of_one_client(engine: Engine) -> Iterator[Any]:
    c = rows(*(Counted(torch.tensor([float(j)]), torch.tensor(0)) for j in BOTH))
    means = []
    for _ in range(6):
        c = each(engine, later, c)
        one = PerClient("server", [b for b in c.blocks if b.ids == (1,)])
        means.append(engine.real(engine.combine(one, {1: 1.0}, True)))
        engine.combine(c, {0: 1.0, 1: 1.0}, True)
    yield [tree.map(lambda a: a.tolist(), mean) for mean in means]


def pairs_of_another_client(engine: Engine) -> Iterator[Any]:
    for _ in range(4):
        two, one = each(engine, pair, start(engine)), start(engine)
        yield engine.real(engine.once(digits, [two.at(0), one.at(1)])).tolist()


@dataclass(frozen=True)
class Power:
    """Two of them may be equal and do different things: 2 == 2.0."""

    exponent: float

    def __call__(self, a: Tensor) -> Tensor:
        return a.long() ** self.exponent


def callables_that_are_equal(engine: Engine) -> Iterator[Any]:
    for power in (Power(2), Power(2.0)):
        for _ in range(4):
            made = seen(engine, each(engine, power, start(engine)))
            yield made, [type(value[0]) for value in made]


def one(j: int, value: Any) -> PerClient:
    """A value of one client."""
    if isinstance(value, Tensor):
        return PerClient("server", [Block((j,), value[None], stacked=True)])
    return PerClient("server", [Block((j,), value, stacked=False)])


def summed(a: Tensor) -> Tensor:
    return a.sum(0)


def clients_that_come_with_another_shape(engine: Engine) -> Iterator[Any]:
    """The last client's function is not known for its shape, so it runs at once, while those of the others wait."""
    for k in range(6):
        sizes = {3 * k: 4, 3 * k + 1: 4, 3 * k + 2: 2 + k % 3}
        x = PerClient("server", [Block((j,), torch.ones(1, size, 2), stacked=True) for j, size in sizes.items()])
        sums = PerClient("server", engine.call(summed, (x,), tuple(sizes)))
        more = engine.call(tenfold, (sums,), tuple(sizes))
        last = engine.once(plus_one, [sums.at(3 * k + 2)])
        yield [engine.real(a).tolist() for a in (last, *(block.tree for block in more))]


def square(a: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return (a * a).sum(), {}


def first_value_from_another_client(engine: Engine) -> Iterator[Any]:
    """It is fetched before the client has anything of its own, and another one comes before its pullback is asked."""

    def slopes(k: int) -> list[Any]:
        given = PerClient("server", engine.call(plus_one, (one(0, torch.full((2,), float(k))),), (0,)))
        made = []
        for j, value in ((1, given.at(0)), (2, torch.full((2,), 100.0 * k))):
            (block,) = engine.vjp(square, (one(j, value),), (j,), cut=0)
            engine.real(block.tree[0])
            made.append((j, block.tree[1]))
        asked = (engine.pull(one(j, pull), one(j, torch.ones(())))[0].tree for j, pull in made)
        return [engine.real(found).cut.tolist() for found in asked]

    for k in range(8):
        yield slopes(k)  # after which nobody holds anything


SCENES: tuple[Scene, ...] = (
    same_functions_on_other_values,
    shared_value_or_plain_number,
    numbers_of_several_types,
    shared_value_that_is_let_go,
    transposed_in_place,
    one_value_of_several_clients,
    means_of_one_client,
    pairs_of_another_client,
    callables_that_are_equal,
    clients_that_come_with_another_shape,
    first_value_from_another_client,
)


def played(scene: Scene, engine: Graph) -> list[Any]:
    """As a simulation plays a round: again, where a recording turned out to keep too little."""
    while True:
        try:
            return list(scene(engine))
        except NotKept:
            engine.forget()


@pytest.mark.parametrize("slots", (1, 2, 3))
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_recordings_show_what_the_loop_engine_shows(scene: Scene, slots: int) -> None:
    engine = Graph(Again(CPU), slots)
    with torch.no_grad():
        assert played(scene, engine) == list(scene(Loop()))
    assert engine.num_recordings and not engine.refused


def test_clients_that_never_come_back_leave_nothing_behind() -> None:
    engine = Graph(Again(CPU), 2)
    sizes = []
    with torch.no_grad():
        for first in range(0, 60, 3):  # three clients at a time, each once, on two lanes
            ids = tuple(range(first, first + 3))
            values = PerClient("server", [Block(ids, torch.zeros(3, 1000), stacked=True)])
            for _ in range(3):
                values = PerClient("server", engine.call(plus_one, (values,), ids))
                engine.real(values.at(first))
            sizes.append(len(engine._queues))
    assert max(sizes) <= 6  # those of this time, and perhaps of the time before


class Scaled(NamedTuple):
    """A part of one number."""

    params: dict[str, Tensor]


def scaled(part: Scaled, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return part.params["w"] * x, {}


def test_a_pullback_is_the_same_when_its_lane_was_shared_for_a_while() -> None:
    engine = Graph(Again(CPU), 2)

    def own(j: int, value: Any) -> PerClient:
        return PerClient("clients", [Block((j,), value, stacked=False)])

    def made(x: float) -> Block:
        part = own(0, Scaled({"w": torch.tensor([2.0])}))
        (block,) = engine.vjp(scaled, (part, own(0, torch.tensor([x]))), (0,), cut=None)
        engine._flush()
        return block

    def slope(block: Block) -> float:
        pull = PerClient("clients", [block._replace(tree=block.tree[1])])
        (found,) = engine.pull(pull, own(0, torch.ones(1)))
        return float(engine.real(found.tree).params["w"])

    def visited(j: int) -> Block:
        (block,) = engine.call(plus_one, (PerClient("clients", [Block((j,), torch.ones(1, 1), stacked=True)]),), (j,))
        engine._flush()
        return block

    def story() -> list[float]:
        found = [slope(made(float(k))) for k in range(5)]  # until it is recorded
        old = made(100.0)
        for _ in range(3):
            guests = visited(1), visited(2)  # three clients on two lanes
        del guests
        visited(3)
        new = made(7.0)
        return [*found, slope(old), slope(new)]

    with torch.no_grad():
        try:
            slopes = story()
        except NotKept:  # as a simulation plays a round again
            engine.forget()
            slopes = story()
    assert slopes == [0.0, 1.0, 2.0, 3.0, 4.0, 100.0, 7.0]
