"""Specifies when a chain writes a result over the value that it replaces: if nothing reads the old value any more."""

from typing import Any

import pytest
import torch
from conftest import agree
from test_rows import laid_out, must_be
from torch import Tensor

from cutlayer import optim
from cutlayer.core import tree
from cutlayer.core.state import Grads, Model, Part, Tensors
from cutlayer.engines.graph import lane
from cutlayer.engines.graph.compiling import Compiled, compiling
from cutlayer.engines.graph.execute import Inputs, executed
from cutlayer.engines.graph.in_place import in_place, step_in_place
from cutlayer.engines.graph.overwriting import overwritable
from cutlayer.engines.graph.queue import Argument, Operation, Same


class Adder:
    """Adds to a value, if possible into given memory."""

    def add(self, value: Tensor, more: Tensor) -> Tensor:
        return value + more

    def plain(self, value: Tensor, more: Tensor) -> Tensor:
        return value + more


@in_place(Adder.add)
def add_in_place(adder: Adder, value: Tensor, more: Tensor, home: Tensor) -> Tensor:
    return torch.add(value, more, out=home)


def double(value: Tensor) -> Tensor:
    return 2 * value


def itself(value: Tensor) -> Tensor:
    return value


def square(value: Tensor, other: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return value.square() * other, {}


ADDER = Adder()
OLD, OTHER = Argument("reads", 0), Argument("reads", 1)


def called(fn: Any, *args: Any) -> Operation:
    return Operation("call", Same(fn), args, None)


def found(*chain: Operation, kept: int = 0, others: tuple[int, ...] = ()) -> list[int]:
    """The numbers of the values that can land where the first thing that the chain reads lies, or elsewhere."""
    old, other = laid_out(torch.arange(4.0)), laid_out(torch.ones(4))
    homes = {kept: old} | {number: laid_out(torch.zeros(4)) for number in others}
    return list(overwritable(chain, Inputs([old, other], [], {}), homes))


def test_a_result_lands_where_its_last_reader_is_the_command_itself() -> None:
    assert found(called(ADDER.add, OLD, OTHER)) == [0]
    assert found(called(double, OLD), called(ADDER.add, OLD, Argument("made", 0)), kept=1) == [1]
    assert found(called(ADDER.add, OLD, OTHER), called(double, Argument("made", 0)), called(double, OTHER)) == [0]


def test_only_functions_that_can_write_do() -> None:
    assert found(called(ADDER.plain, OLD, OTHER)) == []
    assert found(called(double, OLD)) == []


def test_nothing_lands_on_what_a_later_command_reads() -> None:
    assert found(called(ADDER.add, OLD, OTHER), called(double, OLD)) == []
    assert found(called(itself, OLD), called(ADDER.add, OLD, OTHER), called(double, Argument("made", 0)), kept=1) == []


def test_nothing_lands_on_what_leaves_the_chain_as_it_was() -> None:
    passed_on = called(itself, OLD), called(ADDER.add, OLD, OTHER)
    assert found(*passed_on, kept=1) == [1]
    assert found(*passed_on, kept=1, others=(0,)) == []


class Keeper:
    """Adds, and hands on what there was before as well."""

    def add(self, value: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        return value + more, value


@in_place(Keeper.add)
def keep_in_place(keeper: Keeper, value: Tensor, more: Tensor, home: Any) -> tuple[Tensor, Tensor]:
    raise AssertionError


def test_nothing_lands_on_what_the_result_itself_hands_on() -> None:
    home = laid_out((torch.arange(4.0), torch.ones(4)))
    operation = called(Keeper().add, Argument("reads", 0, (0,)), Argument("reads", 0, (1,)))
    assert overwritable([operation], Inputs([home], [], {}), {0: home}) == {}


def test_nothing_lands_on_what_a_pullback_still_needs() -> None:
    forward = Operation("vjp", Same(square), (OTHER, OLD), 0)
    pull = Operation("pull", Same(None), (Argument("made", 1), OTHER), None)
    add = called(ADDER.add, OLD, OTHER)
    assert found(forward, pull, add, kept=3) == [3]
    assert found(forward, add, pull, kept=2) == []


def test_an_in_place_result_equals_the_stored_one() -> None:
    old, other = laid_out(torch.arange(4.0)), laid_out(torch.ones(4))
    chain = called(ADDER.add, OLD, OTHER), called(double, Argument("made", 0))
    made = executed(chain, Inputs([old, other], [], {}), homes={0: old})
    assert made[0] is old and old.tolist() == [1.0, 2.0, 3.0, 4.0] and made[1].tolist() == [2.0, 4.0, 6.0, 8.0]


def test_rows_are_as_before_after_a_trial_even_one_that_fails() -> None:
    home = laid_out((torch.arange(3.0), torch.ones(2)))
    with pytest.raises(ValueError), lane._unchanged([home]):
        home[0].zero_()
        raise ValueError
    must_be(home, (torch.arange(3.0), torch.ones(2)))


# -- steps of optimisers -----------------------------------------------------------------------------------------------

OPTIMISERS = {
    "momentum": optim.sgd(0.1, momentum=0.9, weight_decay=0.01, clip=1.0),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "plain": optim.sgd(0.1),
    "proximal": optim.sgd(0.1, momentum=0.9, proximal=0.1),
    "adam": optim.adam(0.1),
    "adamw": optim.adamw(0.1, weight_decay=0.1),
}


def drawn(random: torch.Generator) -> Tensors:
    shapes = {"w": (3, 2, 2, 2), "b": (3,)}
    return {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def part_of(opt: optim.Optimiser) -> Part:
    values = drawn(torch.Generator().manual_seed(0))
    model = Model(values, {"fixed": torch.ones(2)}, {"mean": torch.zeros(3), "count": torch.tensor(2)})
    return opt.step(opt.begin(model, 0), gradients(1))


def gradients(seed: int) -> Grads:
    values = drawn(torch.Generator().manual_seed(seed))
    return Grads(values, {"mean": torch.ones(3), "count": torch.tensor(3)}, loss=torch.tensor(0.5))


@pytest.fixture(params=[False, True], ids=["as it is", "compiled"])
def compiled(request: pytest.FixtureRequest, eager: list[int]) -> bool:
    return bool(request.param)


def stepped(opt: optim.Optimiser, part: Part, grads: Grads, home: Part, compiled: bool) -> Part:
    if not compiled:
        return step_in_place(opt, part, grads, home)
    with compiling(), lane._unchanged([home]):
        step_in_place(opt, part, grads, home)  # tracing writes, too
    with compiling():
        return step_in_place(opt, part, grads, home)


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("own", [True, False], ids=["over itself", "elsewhere"])
def test_a_step_into_memory_gives_the_numbers_of_the_plain_step(name: str, own: bool, compiled: bool) -> None:
    opt = OPTIMISERS[name]
    expected = opt.step(part_of(opt), gradients(2))
    part = laid_out(part_of(opt))
    home = part if own else laid_out(tree.map(torch.zeros_like, part_of(opt)))
    made = stepped(opt, part, laid_out(gradients(2)), home, compiled)
    found = tree.map(Tensor.contiguous, (home.params, home.moments, made.buffers))
    agree(found, (expected.params, expected.moments, expected.buffers), 1e-14)  # rates are tensors here, floats there
    assert made.params["w"].data_ptr() == home.params["w"].data_ptr()
    assert (int(made.count), bool(made.progress.ok), int(made.progress.steps)) == (2, True, 2)
    if not own:
        must_be(dict(part.params), part_of(opt).params)


def test_a_step_into_memory_stands_still_at_a_gradient_that_is_not_finite(compiled: bool) -> None:
    opt = OPTIMISERS["momentum"]
    part, grads = laid_out(part_of(opt)), laid_out(gradients(2))
    grads.params["b"][0] = torch.nan
    made = stepped(opt, part, grads, part, compiled)
    must_be((part.params, part.moments), (part_of(opt).params, part_of(opt).moments))
    assert not made.progress.ok


def test_a_compiled_function_may_write_into_a_tensor_that_it_is_given_twice(eager: list[int]) -> None:
    def add(value: Tensor, more: Tensor, home: Tensor) -> Tensor:
        home.copy_(value + more)
        return value.new_zeros(1)

    fast, value, more, other = Compiled(add), torch.arange(4.0), torch.ones(4), torch.zeros(4)
    for home in (other, value, other):
        with lane._unchanged([home]):
            fast(value, more, home)
        expected = value + more
        fast(value, more, home)
        must_be(home, expected)
    assert len(eager) == 2  # once for each way to give them
    assert value.tolist() == [1.0, 2.0, 3.0, 4.0] and other.tolist() == [2.0, 3.0, 4.0, 5.0]
