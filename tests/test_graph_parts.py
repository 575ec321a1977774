"""Specifies what the engine `graph` is made of: forms, queues of handles, and chains that cannot be recorded or that
kept too little."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from conftest import agree, clients_of, images, resnet, run, simulation
from test_compiling import said
from test_engines_agree import CASES, Outcome, must_agree
from test_rows import OPTIMISERS, begun, gradients, laid_out, must_be, some
from torch import Tensor

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.state import Model
from cutlayer.core.values import Block, PerClient
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.forms import Form, Forms, Layout, copy_into, follow
from cutlayer.engines.graph.lane import Lane, with_plain_numbers
from cutlayer.engines.graph.queue import Argument, ClientQueue, Literal, Operation, Promise, Shared, name_of
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.loop import Loop
from cutlayer.meters.ledger import Ledger
from cutlayer.split import Split

CPU = torch.device("cpu")
MOST_UNRECORDED = {"mergesfl": 0, "sfl_v2": 5}  # in a late round; the order of clients is another one each time


# -- forms -------------------------------------------------------------------------------------------------------------


def test_values_that_look_alike_have_one_form() -> None:
    forms, opt = Forms(), OPTIMISERS["momentum, decay"]
    part = begun(opt)
    later = opt.step(part, gradients(0))
    form = forms.of(part)
    assert forms.of(later) is form  # whatever its count
    assert forms.of(part._replace(count=1.0)) is not form
    assert forms.of(part._replace(params=some(0, torch.float32))) is not form
    assert form.field("params") is forms.of(some(5))
    assert forms.pullback() is not forms.pullback()


def test_a_layout_gives_back_what_was_put_there_with_tensors_for_numbers() -> None:
    value = (some(0), 3, None, (0.25, {"deep": {"x": some(1)["bias"]}}), "word")
    home = laid_out(value)
    assert (home[1].dtype, home[3][0].dtype) == (torch.int64, torch.float64)
    assert home[2] is None and home[4] == "word"
    found = with_plain_numbers(Forms().of(value), home)
    assert found[1:3] == (3, None) and found[3][0] == 0.25
    must_be((dict(found[0]), found[3][1]), (value[0], value[3][1]))


def test_where_a_field_lies_in_the_rows_of_a_value() -> None:
    forms, part = Forms(), begun(OPTIMISERS["adam"])
    form = forms.of(part)
    memory = form.layout.empty(CPU)
    copy_into(form.layout.of(memory), part)
    for path in (("params",), ("buffers",), ("moments",), ("progress", "steps"), ("lr",)):
        inner: Form = form
        for name in path:
            inner = inner.field(name)
        found = form.stretches(inner, path)
        assert found is not None
        own = {s.dtype: memory[s.dtype][s.start : s.start + s.size] for s in found}
        must_be(with_plain_numbers(inner, inner.layout.of(own)), follow(part, path))


def test_fields_by_name_and_items_by_number() -> None:
    assert tree.field(Model({}, {}, {"a": torch.ones(1)}), "buffers")["a"].item() == 1
    assert follow((1, (2, Model({"w": torch.ones(2)}, {}, {}))), (1, 1, "params"))["w"].sum() == 2


def test_rows_of_one_order_are_copied_as_rows_and_others_tensor_by_tensor() -> None:
    layout = Layout(tree.shapes(some(0)))
    target = layout.of(layout.empty(CPU))
    source = laid_out(some(1))
    source.rows[torch.float64][27] = 5.0  # between two tensors
    copy_into(target, source)
    agree(target.rows[torch.float64], source.rows[torch.float64], 0)
    copy_into(target, some(2))
    must_be(dict(target), some(2))
    assert target.rows[torch.float64][27] == 5.0


# -- queues ------------------------------------------------------------------------------------------------------------


def test_slots_that_nobody_holds_are_used_again_the_lowest_first() -> None:
    queue, form = ClientQueue(0), Forms().of(begun(OPTIMISERS["sgd"]))
    refs = [queue.promise(form) for _ in range(3)]
    assert [ref.held.slot for ref in refs] == [0, 1, 2]
    part = refs[0].item("params")
    del refs[:2]
    queue.collect()
    assert sorted(queue.forms) == [0, 2]  # a field holds its value
    assert queue.promise(form).held.slot == 1
    del part
    kept = [queue.promise(form) for _ in range(3)]
    assert [ref.held.slot for ref in kept] == [0, 1, 3]


def test_a_chain_names_what_it_reads_and_makes_by_their_order() -> None:
    queue, form = ClientQueue(0), Forms().of(begun(OPTIMISERS["sgd"]))

    def step(old: Promise) -> tuple[list[Operation], Promise]:
        queue.begin()
        value = torch.ones(2)
        first, again = queue.external(form, value), queue.external(form, value)
        args = queue.argument(old.item("params")), first, again, Literal(int, 2)
        (new,) = queue.add(Operation("call", None, args, None), (form,))
        (last,) = queue.add(Operation("call", None, (queue.argument(new),), None), (form,))
        return queue.operations, last

    start = queue.promise(form)
    one, last = step(start)
    assert one[0].args == (
        Argument("reads", 0, ("params",)),
        Argument("externals", 0),
        Argument("externals", 0),
        Literal(int, 2),
    )
    assert one[1].args == (Argument("made", 0),)
    two, _ = step(last)
    assert two == one and last.held.slot != start.held.slot


def test_arguments_of_different_kinds_are_never_equal() -> None:
    kinds = (
        *(Argument(source, 1) for source in ("reads", "made", "common", "externals")),
        Literal(int, 1),
        Literal(float, 1.0),
        Literal(bool, True),
    )
    assert len(set(kinds)) == len(kinds)
    assert name_of(partial(torch.add, 1)) != name_of(partial(torch.add, 1.0)) != name_of(partial(torch.add, True))


def test_partial_functions_of_the_same_objects_have_one_name() -> None:
    scale = torch.ones(1)
    assert name_of(partial(torch.add, scale, alpha=2)) == name_of(partial(torch.add, scale, alpha=2))
    assert name_of(partial(torch.add, scale, alpha=2)) != name_of(partial(torch.add, scale, alpha=3))
    assert name_of(partial(torch.add, scale)) != name_of(partial(torch.add, torch.ones(1)))


# -- the engine --------------------------------------------------------------------------------------------------------


class Refusing(Again):
    """A recorder that can record nothing."""

    def record(self, lane: int, what: Any, trial: Any, body: Any, **how: bool) -> Any:
        raise RuntimeError("no such thing")


class World:
    """A method on ragged clients, round by round."""

    def __init__(self, case: str, engine: Graph | None) -> None:
        name, options, batching = CASES[case]
        opt = optim.sgd(0.05, momentum=0.9)
        method = methods.build(name, Split(resnet(), 1), opt, opt, **options)
        self.sim = simulation(method, images(), clients_of(), batching=batching)
        self.sim.backend.engine = engine or self.sim.backend.engine
        self.state = self.sim.start()

    def round(self) -> None:
        self.state = self.sim.round(self.state)

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.state, self.sim.ledger)


def on_loop(case: str, rounds: int) -> Outcome:
    world = World(case, None)
    for _ in range(rounds):
        world.round()
    return world.outcome


@pytest.mark.parametrize("case", ("fedavg", "sfl_v1", "mergesfl"))
def test_a_chain_that_cannot_be_recorded_runs_as_it_is_and_says_why_once(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Graph(Refusing(CPU), 5)
    world = World(case, engine)
    for _ in range(2):
        world.round()
    must_agree(world.outcome, on_loop(case, 2), 1e-12)
    assert said(caplog) == ["engine graph: a chain runs unrecorded (RuntimeError: no such thing)"]
    assert engine.num_recordings == 0


@dataclass(frozen=True)
class Stubborn:
    """A rule that looks its rate up by the count of steps, which in a recording is a tensor."""

    rates: tuple[float, ...] = (0.1, 0.05, 0.01)
    moments = ()

    def __call__(self, value: Tensor, gradient: Tensor, moments: Any, lr: Any, count: Any) -> Any:
        return value - dict(enumerate(self.rates * 20))[count] * gradient, ()


def test_a_rule_that_cannot_do_with_a_tensor_for_a_number_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    opt = replace(optim.sgd(0.05), rule=Stubborn())
    found = []
    for engine in (Loop(), Graph(Again(CPU), 5)):
        sim = simulation(methods.build("sfl_v1", Split(resnet(), 1), opt, opt), images(), clients_of())
        sim.backend.engine = engine
        found.append(Outcome(run(sim), sim.ledger))
    must_agree(found[1], found[0], 1e-12)
    assert said(caplog) == ["engine graph: a chain runs unrecorded (KeyError: tensor(3))"]


@pytest.mark.parametrize("case", ("mergesfl", "sfl_v2"))
def test_chains_with_pullbacks_that_outlive_them_come_to_rest(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unrecorded: list[int] = []
    as_it_is = Lane._as_it_is
    monkeypatch.setattr(Lane, "_as_it_is", lambda *given: (unrecorded.append(1), as_it_is(*given))[1])
    world, counts = World(case, Graph(Again(CPU), 5)), []
    for _ in range(9):
        unrecorded.clear()
        world.round()
        counts.append(len(unrecorded))
    assert counts[0] > 10 and counts[-1] <= MOST_UNRECORDED[case], counts


@pytest.mark.parametrize("case", ("smofi", *(pytest.param(c, marks=pytest.mark.slow) for c in ("fedavg", "sfl_v1"))))
def test_a_round_whose_recordings_kept_too_little_is_played_again_and_counts_once(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, again, second = Graph(Again(CPU), 5), [], Ledger()
    world = World(case, engine)
    world.sim.meters = (*world.sim.meters, second)  # as a user may add one
    for _ in range(3):
        world.round()
    forget = engine.forget
    monkeypatch.setattr(engine, "forget", lambda **o: (again.append(world.sim.ledger.content()), forget(**o)))
    for chain in engine._book.chains.values():
        chain.used.clear()  # as if nobody had ever read anything later
    world.round()
    assert again
    must_agree(world.outcome, on_loop(case, 4), 1e-12)
    plays = len(again)
    world.round()
    assert len(again) == plays  # it has learnt
    assert second.content() == world.sim.ledger.content()
    must_agree(world.outcome, on_loop(case, 5), 1e-12)


@pytest.mark.parametrize("case", ("fedavg", "smofi"))
def test_rounds_after_the_first_ones_make_no_new_recordings(case: str) -> None:
    engine, counts = Graph(Again(CPU), 5), []
    world = World(case, engine)
    for _ in range(6):
        world.round()
        counts.append(engine.num_recordings)
    assert 0 < counts[0] <= counts[3] == counts[4] == counts[5]


def test_a_value_that_waits_looks_like_what_it_will_be_and_is_no_number() -> None:
    def doubled(x: Tensor) -> Model:
        return Model({"w": 2 * x}, {}, {})

    engine = Graph(Again(CPU), 2)
    given = PerClient("clients", [Block((0, 1), torch.tensor([[1.0], [3.0]]), stacked=True)])
    engine.call(doubled, [given], (0, 1))
    waiting = engine.call(doubled, [given], (0, 1))
    handle = waiting[1].tree
    looked = tree.map(lambda a: a, handle)
    assert isinstance(looked, Model) and looked.params["w"].device.type == "meta"
    assert looked.params["w"].shape == (1,) and tree.num_bytes(handle) == 4
    params = handle.item("params")
    for use in (lambda: handle + 1, lambda: float(params), lambda: torch.add(handle, 1), lambda: handle["w"]):
        with pytest.raises(TypeError):
            use()
    assert [engine.real(block.tree).params["w"].item() for block in waiting] == [2.0, 6.0]


class Homonyms(NamedTuple):
    """Fields with the names of what handles have themselves."""

    bare: Tensor
    form: Tensor
    held: Tensor
    item: Tensor
    path: Tensor
    signature: Tensor


def test_a_field_may_have_the_name_of_something_that_handles_have() -> None:
    assert {name for name in (*dir(Promise), *dir(Shared)) if not name.startswith("_")} == set(Homonyms._fields)

    def several(x: Tensor) -> Homonyms:
        return Homonyms(*(x + k for k in range(6)))

    engine = Graph(Again(CPU), 2)
    given = PerClient("clients", [Block((0, 1), torch.tensor([1.0, 3.0]), stacked=True)])
    for _ in range(4):  # at once, in a chain, and in one that is recorded
        made = PerClient("clients", engine.call(several, [given], (0, 1)))
        total = engine.combine(made, {0: 1.0, 1: 1.0}, largest_integers=False)
        for k, name in enumerate(Homonyms._fields):
            assert [engine.real(block.tree) for block in getattr(made, name).blocks] == [1 + k, 3 + k]
            assert engine.real(tree.field(total, name)) == 4 + 2 * k
    assert engine.num_recordings == 2 and isinstance(total, Shared)


# -- the choice of the engine ------------------------------------------------------------------------------------------


def test_graph_without_a_gpu_is_auto_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cutlayer")
    opt = optim.sgd(0.05, momentum=0.9)
    sim = simulation(methods.build("sfl_v1", Split(resnet(), 1), opt, opt), engine="graph")
    first, second = said(caplog)
    assert first == "engine graph needs data on a CUDA device, and these are on the CPU: auto is used instead"
    assert second.startswith(f"engine auto: {sim.engine_name}; ") and sim.engine_name in ("loop", "vmap")
    found = Outcome(run(sim), sim.ledger)
    must_agree(found, on_loop("sfl_v1", 2), 1e-12)
