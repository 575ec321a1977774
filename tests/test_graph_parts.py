"""Specifies what the engine `graph` is made of: rows of memory, forms, queues of handles, fused functions, and chains
that cannot be recorded or that kept too little."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from conftest import agree, clients_of, images, resnet, run, simulation
from test_engines_agree import CASES, Dropping, Outcome, must_agree
from torch import Tensor

from cutlayer import methods, optim, rows, tree
from cutlayer.calculus import vjp
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.forms import Form, Forms, Layout, copied, field, follow, stretches
from cutlayer.engines.graph.lane import Lane, lowered
from cutlayer.engines.graph.queue import Command, Common, Literal, Made, Put, Queue, Read, Ref, name_of
from cutlayer.engines.graph.recorder import Again
from cutlayer.engines.loop import Loop
from cutlayer.fusing import Fused, fusing, outliving
from cutlayer.meters.ledger import Ledger
from cutlayer.rows import Rows
from cutlayer.rules import squared_norm
from cutlayer.split import Split
from cutlayer.state import Grads, Model, Part, Tensors
from cutlayer.values import Block, PerClient

CPU = torch.device("cpu")
MOST_UNRECORDED = {"mergesfl": 0, "sfl_v2": 5}  # in a late round; the order of clients is another one each time
SHAPES = {"weight": (3, 2, 2, 2), "bias": (3,), "scale": (), "matrix": (5, 2)}


def some(seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """Named tensors none of which fills a whole number of 16 bytes, except for the matrix."""
    random = torch.Generator().manual_seed(seed)
    return {k: torch.randn(s, generator=random, dtype=torch.float64).to(dtype) for k, s in SHAPES.items()}


def laid_out(value: Any) -> Any:
    """The value in rows of memory; its numbers are tensors."""
    layout = Layout(tree.shapes(value))
    home = layout.of(layout.empty(CPU))
    copied(home, value)
    return home


def must_be(found: Any, expected: Any) -> None:
    agree(tree.map(torch.Tensor.contiguous, found), expected, 0)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_tensors_lie_side_by_side_each_at_a_multiple_of_16_bytes() -> None:
    values = {**some(0, torch.float32), "count": torch.tensor(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    home = laid_out(values)
    assert isinstance(home, Rows)
    starts = {name: place.start for name, place in home.places.items()}
    assert starts == {"weight": 0, "bias": 24, "scale": 28, "matrix": 32, "count": 0, "half": 0}
    sizes = {dtype: len(row) for dtype, row in home.rows.items()}
    assert sizes == {torch.float32: 44, torch.int64: 2, torch.bfloat16: 8}
    must_be(dict(home), values)
    gaps = torch.cat([home.rows[torch.float32][27:28], home.rows[torch.float32][29:32]])
    assert gaps.tolist() == [0.0] * 4


def test_weights_of_convolutions_lie_channels_last() -> None:
    home = laid_out(some(0))
    assert home["weight"].is_contiguous(memory_format=torch.channels_last)
    assert not home["weight"].is_contiguous() and home["matrix"].is_contiguous()
    agree(home.rows[torch.float64][:24], some(0)["weight"].permute(0, 2, 3, 1).reshape(-1), 0)


def test_values_that_lie_in_such_rows_are_packed_without_a_copy() -> None:
    home = laid_out(some(0))
    assert home.packed(home) is home.rows
    gathered = home.gathered(some(1))
    by_name = dict(gathered.items())  # no longer known as rows
    (row,) = home.packed(by_name).values()
    assert row.data_ptr() == gathered["weight"].data_ptr() and row.shape == home.rows[torch.float64].shape
    row.zero_()
    assert all(not value.any() for value in by_name.values())


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_other_values_are_packed_as_a_copy_with_zeros_between_them(dtype: torch.dtype) -> None:
    values = some(1, dtype)
    home = laid_out(some(0))
    (row,) = home.packed(values).values()
    agree(row, laid_out(tree.map(torch.Tensor.double, values)).rows[torch.float64], 0)
    row.zero_()
    agree(values, some(1, dtype), 0)


def test_values_in_the_rows_of_a_larger_value_are_packed_as_a_copy() -> None:
    both = laid_out((some(0), some(1)))
    (row,) = both[0].packed(dict(both[1])).values()
    agree(row, both[1].rows[torch.float64], 0)
    assert row.data_ptr() != both[1].rows[torch.float64].data_ptr()


def test_values_that_lie_in_such_rows_but_elsewhere_are_packed_as_a_copy() -> None:
    home = laid_out({"a": torch.ones(2), "b": torch.zeros(2)})
    found = home.gathered({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})
    (row,) = home.packed({"a": found["b"], "b": found["a"]}).values()
    assert row.tolist() == [3.0, 4.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0]


def test_values_of_mixed_types_are_gathered_in_the_types_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda a: torch.full_like(a, torch.nan))  # as new memory may well be
    home = laid_out(some(0, torch.float32))
    wide = some(1, torch.float32)
    values = {name: value.bfloat16() if value.dim() > 1 else value for name, value in wide.items()}
    found = home.gathered(values)
    must_be(dict(found), tree.map(torch.Tensor.float, values))
    (row,) = found.rows.values()
    assert (row.dtype, row[27].item(), row[29:32].tolist()) == (torch.float32, 0.0, [0.0] * 3)
    assert found.places == home.places


def test_leaves_of_rows_share_no_history_and_only_kernels_are_converted() -> None:
    home = laid_out(some(0, torch.float32))
    leaves = home.leaves(torch.bfloat16)
    kinds = {name: (value.dtype, value.requires_grad, value.is_leaf) for name, value in leaves.items()}
    half, single = (torch.bfloat16, True, True), (torch.float32, True, True)
    assert kinds == {"weight": half, "bias": single, "scale": single, "matrix": single}
    must_be({k: v.detach() for k, v in leaves.items()}, {k: home[k].to(v.dtype).clone() for k, v in leaves.items()})
    assert {value.dtype for value in home.leaves(None).values()} == {torch.float32}


# -- optimisers on rows ------------------------------------------------------------------------------------------------

OPTIMISERS = {
    "sgd": optim.sgd(0.1),
    "momentum, decay": optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov, clip": optim.sgd(0.1, momentum=0.9, nesterov=True, clip=0.5),
    "clip with decay": optim.sgd(0.1, weight_decay=0.1, clip=0.5, clip_decay=True),
    "clip jointly": optim.sgd(0.1, clip=0.5, clip_scope="joint"),
    "proximal": optim.sgd(0.1, momentum=0.9, proximal=0.3),
    "adam": optim.adam(0.01, weight_decay=0.1, clip=0.5),
    "adamw": optim.adamw(0.01, weight_decay=0.1, proximal=0.3),
}


def buffers(seed: int) -> Tensors:
    return {"mean": some(seed)["bias"], "var": some(seed + 1)["bias"], "count": torch.tensor(seed)}


def gradients(seed: int) -> Grads:
    params = some(100 + seed)
    loss = params["scale"].abs()
    return Grads(params, buffers(seed), loss=loss, norm2=2 * squared_norm(params))


def begun(opt: optim.Optimiser) -> Part:
    return opt.begin(Model(some(0), {"frozen": some(9)["bias"]}, buffers(0)), 0)


def stepped(opt: optim.Optimiser, part: Part, grads: Callable[[Part, int], Grads]) -> Part:
    for k in range(3):
        part = opt.step(part, grads(part, k))
    return part


@pytest.mark.parametrize("gathered", (True, False), ids=("gradients in rows", "gradients apart"))
@pytest.mark.parametrize("opt", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_step_on_rows_gives_the_numbers_of_the_plain_step(opt: optim.Optimiser, gathered: bool) -> None:
    def own(part: Part, k: int) -> Grads:
        given = gradients(k)
        found = given._replace(params=part.params.gathered(given.params)) if gathered else given  # type: ignore[attr-defined]
        assert rows.fits(part, found)
        return found

    start = begun(opt)
    expected = stepped(opt, start, lambda _, k: gradients(k))
    found = stepped(opt, laid_out(start), own)
    assert all(isinstance(a, Rows) for a in (found.params, found.buffers, *found.moments.values()))
    agree(lowered(Forms().of(start), found), expected, 1e-12)
    assert int(found.count) == 3 and int(found.buffers["count"]) == 2  # type: ignore[call-overload]


def test_a_part_in_rows_stands_still_from_a_gradient_on_that_is_not_finite() -> None:
    def broken(part: Part, k: int) -> Grads:
        given = gradients(k)
        return given._replace(params={**given.params, "bias": given.params["bias"] / (0.0 if k == 1 else 1.0)})

    opt = OPTIMISERS["adam"]
    found = stepped(opt, laid_out(begun(opt)), broken)
    once = opt.step(begun(opt), gradients(0))
    agree(dict(found.params), once.params, 1e-12)
    assert (int(found.progress.steps), bool(found.progress.ok)) == (1, False)


def test_a_missing_gradient_keeps_a_part_out_of_rows() -> None:
    opt = OPTIMISERS["momentum, decay"]
    fewer = gradients(0)._replace(params={k: v for k, v in gradients(0).params.items() if k != "bias"})
    part = laid_out(begun(opt))
    assert not rows.fits(part, fewer)
    agree(opt.step(part, fewer).params, opt.step(begun(opt), fewer).params, 1e-12)


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
    found = lowered(Forms().of(value), home)
    assert found[1:3] == (3, None) and found[3][0] == 0.25
    must_be((dict(found[0]), found[3][1]), (value[0], value[3][1]))


def test_where_a_field_lies_in_the_rows_of_a_value() -> None:
    forms, part = Forms(), begun(OPTIMISERS["adam"])
    form = forms.of(part)
    memory = form.layout.empty(CPU)
    copied(form.layout.of(memory), part)
    for path in (("params",), ("buffers",), ("moments",), ("progress", "steps"), ("lr",)):
        inner: Form = form
        for name in path:
            inner = inner.field(name)
        found = stretches(form, inner, path)
        assert found is not None
        own = {s.dtype: memory[s.dtype][s.start : s.start + s.size] for s in found}
        must_be(lowered(inner, inner.layout.of(own)), follow(part, path))


def test_fields_by_name_and_items_by_number() -> None:
    assert field(Model({}, {}, {"a": torch.ones(1)}), "buffers")["a"].item() == 1
    assert follow((1, (2, Model({"w": torch.ones(2)}, {}, {}))), (1, 1, "params"))["w"].sum() == 2


def test_rows_of_one_order_are_copied_as_rows_and_others_tensor_by_tensor() -> None:
    layout = Layout(tree.shapes(some(0)))
    target = layout.of(layout.empty(CPU))
    source = laid_out(some(1))
    source.rows[torch.float64][27] = 5.0  # between two tensors
    copied(target, source)
    agree(target.rows[torch.float64], source.rows[torch.float64], 0)
    copied(target, some(2))
    must_be(dict(target), some(2))
    assert target.rows[torch.float64][27] == 5.0


# -- queues ------------------------------------------------------------------------------------------------------------


def test_slots_that_nobody_holds_are_used_again_the_lowest_first() -> None:
    queue, form = Queue(0), Forms().of(begun(OPTIMISERS["sgd"]))
    refs = [queue.held(form) for _ in range(3)]
    assert [ref.cell.slot for ref in refs] == [0, 1, 2]
    part = refs[0].params
    del refs[:2]
    queue.collect()
    assert sorted(queue.forms) == [0, 2]  # a field holds its value
    assert queue.held(form).cell.slot == 1
    del part
    kept = [queue.held(form) for _ in range(3)]
    assert [ref.cell.slot for ref in kept] == [0, 1, 3]


def test_a_chain_names_what_it_reads_and_makes_by_their_order() -> None:
    queue, form = Queue(0), Forms().of(begun(OPTIMISERS["sgd"]))

    def step(old: Ref) -> tuple[list[Command], Ref]:
        queue.begin()
        value = torch.ones(2)
        first, again = queue.put(form, value), queue.put(form, value)
        args = queue.argument(old.params), first, again, Literal(int, 2)
        (new,) = queue.add(Command("call", None, args, None), (form,))
        (last,) = queue.add(Command("call", None, (queue.argument(new),), None), (form,))
        return queue.commands, last

    start = queue.held(form)
    one, last = step(start)
    assert one[0].args == (Read(0, ("params",)), Put(0), Put(0), Literal(int, 2))
    assert one[1].args == (Made(0, ()),)
    two, _ = step(last)
    assert two == one and last.cell.slot != start.cell.slot


def test_arguments_of_different_kinds_are_never_equal() -> None:
    kinds = (Read(1, ()), Made(1, ()), Common(1, ()), Put(1), Literal(int, 1), Literal(float, 1.0), Literal(bool, True))
    assert len(set(kinds)) == len(kinds)
    assert name_of(partial(torch.add, 1)) != name_of(partial(torch.add, 1.0)) != name_of(partial(torch.add, True))


def test_partial_functions_of_the_same_objects_have_one_name() -> None:
    scale = torch.ones(1)
    assert name_of(partial(torch.add, scale, alpha=2)) == name_of(partial(torch.add, scale, alpha=2))
    assert name_of(partial(torch.add, scale, alpha=2)) != name_of(partial(torch.add, scale, alpha=3))
    assert name_of(partial(torch.add, scale)) != name_of(partial(torch.add, torch.ones(1)))


# -- fused functions ---------------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "cutlayer"]


def waves(values: Model, x: Tensor, power: int) -> tuple[Tensor, Tensors]:
    out = torch.sin(x @ values.params["w"]) ** power
    return out, {"seen": values.buffers["seen"] + out.detach().mean()}


def wave_values(seed: int) -> tuple[Model, Tensor]:
    random = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 2, generator=random, dtype=torch.float64)
    x = torch.randn(4, 3, generator=random, dtype=torch.float64)
    return Model({"w": w.requires_grad_()}, {}, {"seen": x.sum()}), x.requires_grad_()


@pytest.mark.slow
def test_a_fused_function_is_the_function_and_so_are_its_gradients(eager: list[int]) -> None:
    fast = Fused(waves)
    for seed, power in ((0, 2), (1, 2), (2, 3)):  # values may change, and what is no tensor is compiled anew
        found, expected = [], []
        for fn, results in ((fast, found), (waves, expected)):
            values, x = wave_values(seed)
            out, kept = fn(values, x, power)
            results += [out.detach(), kept, *torch.autograd.grad(out.sum(), (values.params["w"], x))]
        agree(found, expected, 1e-12)
    assert len(eager) == 2


def stubborn(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x * 3


def test_a_function_that_cannot_be_traced_runs_as_it_is_and_says_why(
    eager: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    fast = Fused(stubborn)
    assert [fast(torch.tensor([a])).item() for a in (1.0, -1.0, 2.0)] == [2.0, -3.0, 4.0]
    (why,) = said(caplog)
    assert why.startswith(
        "not compiled, and so slower: stubborn (It appears that you're trying to get value out of a tracing tensor"
    )
    assert not eager


def test_a_function_that_the_compiler_fails_on_runs_as_it_is_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Tensor) -> Tensor:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(torch, "compile", lambda traced, **_: fails)
    fast = Fused(waves)
    for seed in (0, 1):
        agree(fast(*wave_values(seed), 2), waves(*wave_values(seed), 2), 0)
    assert said(caplog) == ["not compiled, and so slower: waves (no compiler here)"]


class StraightThrough(torch.autograd.Function):
    """Rounds, and hands the gradient on as if it had not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def rounded(x: Tensor) -> Tensor:
    made: Tensor = StraightThrough.apply(2 * x)
    return made


def test_a_function_with_a_backward_pass_of_its_own_keeps_it(
    eager: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.tensor([0.2, 1.6], requires_grad=True)
    (gradient,) = torch.autograd.grad(Fused(rounded)(x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0] and not eager
    why = "it has a backward pass of its own, which a trace would lose"
    assert said(caplog) == [f"not compiled, and so slower: rounded ({why})"]


def half_frozen(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean()
    return scale * x


def test_what_a_function_does_without_gradients_ends_there(eager: list[int]) -> None:
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(Fused(half_frozen)(x).sum(), x)
    assert gradient.tolist() == [2.0, 2.0] and len(eager) == 1


def test_functions_are_not_traced_inside_of_vmap(eager: list[int]) -> None:
    fast = Fused(torch.sin)
    agree(torch.vmap(fast)(torch.ones(3, 2)), torch.ones(3, 2).sin(), 0)
    assert not eager


def test_a_compiled_pullback_that_lasts_can_be_asked_again_whatever_others_did(eager: list[int]) -> None:
    def run(part: Model, x: Tensor) -> tuple[Tensor, Tensors]:
        return fast(part.params["w"], x), {}

    fast = Fused(lambda w, x: torch.sin(x @ w))
    (values, x), ask = wave_values(0), torch.ones(4, 2, dtype=torch.float64)
    with fusing():
        once = vjp(run, [values, x.detach()], None)[1](ask)
        with outliving():
            later = vjp(run, [values, x.detach()], None)[1]
        found = [later(ask, again=True) for _ in range(2)]
    assert len(eager) == 2
    for grads in found:
        agree(grads.params, once.params, 0)


def wrong(x: Tensor) -> Tensor:
    return x + torch.ones(5)


def test_a_function_that_fails_by_itself_fails(caplog: pytest.LogCaptureFixture) -> None:
    fast = Fused(wrong)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            fast(torch.ones(3))
    assert len(said(caplog)) == 1


def test_a_fused_segment_gives_the_same_outputs_buffers_and_gradients(eager: list[int]) -> None:
    net = resnet()
    whole = Split(net, 0)._body.segment(0, len(Split(net, 0).units))
    state = net.state_dict()
    x = images(6).x

    def results() -> list[Any]:
        params = {name: state[name].clone().requires_grad_() for name in whole.params}
        own = Model(params, {}, {name: state[name].clone() for name in whole.buffers})
        out, kept = whole(own, x, None)
        assert list(kept) == list(whole.buffers)
        return [out.detach(), tree.detach(kept), *torch.autograd.grad(out.square().sum(), list(params.values()))]

    expected = results()
    with fusing():
        found = [results() for _ in range(2)][-1]
    agree(found, expected, 1e-12)
    counts = {name: int(value) for name, value in found[1].items() if name.endswith("num_batches_tracked")}
    assert counts and set(counts.values()) == {1}
    assert len(eager) == 1


def test_a_fused_step_of_an_optimiser_gives_the_plain_numbers(eager: list[int]) -> None:
    opt = optim.adamw(0.02, proximal=0.2, clip=0.4)
    expected = stepped(opt, begun(opt), lambda _, k: gradients(k))
    with fusing():
        found = stepped(opt, laid_out(begun(opt)), lambda _, k: gradients(k))
    agree(lowered(Forms().of(expected), found), expected, 1e-12)
    assert len(eager) == 1


# -- the engine --------------------------------------------------------------------------------------------------------


class Refusing(Again):
    """A recorder that can record nothing."""

    def record(self, lane: int, trial: Any, body: Any, **how: bool) -> Any:
        raise RuntimeError("no such thing")


class World:
    """A method on ragged clients, round by round."""

    def __init__(self, case: str, engine: Graph | None) -> None:
        name, options, batching = CASES[case]
        opt = optim.sgd(0.05, momentum=0.9)
        method = methods.build(name, Split(resnet(), 1), opt, opt, **options)
        self.sim = simulation(method, images(), clients_of(), batching=batching)
        self.sim.engine = engine or self.sim.engine
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
        sim.engine = engine
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
    engine._book.used.clear()  # as if nobody had ever read anything later
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
    for use in (lambda: handle + 1, lambda: float(handle.params), lambda: torch.add(handle, 1), lambda: handle["w"]):
        with pytest.raises(TypeError):
            use()
    assert [engine.real(block.tree).params["w"].item() for block in waiting] == [2.0, 6.0]


# -- the choice of the engine ------------------------------------------------------------------------------------------


def test_graph_without_a_gpu_is_auto_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cutlayer")
    opt = optim.sgd(0.05, momentum=0.9)
    sim = simulation(methods.build("sfl_v1", Split(resnet(), 1), opt, opt), engine="graph")
    assert said(caplog) == ["engine graph needs data on a CUDA device, and these are on the CPU: auto is used instead"]
    assert sim.engine_name is None
    found = Outcome(run(sim), sim.ledger)
    assert sim.engine_name in ("loop", "vmap")
    assert said(caplog)[1].startswith(f"engine auto: {sim.engine_name}; ") and len(said(caplog)) == 2
    must_agree(found, on_loop("sfl_v1", 2), 1e-12)


def test_graph_with_a_model_that_draws_random_numbers_is_loop_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    opt = optim.sgd(0.05)
    sim = simulation(methods.build("sfl_v1", Split(Dropping().double(), 3), opt, opt), engine="graph")
    assert sim.engine_name == "loop"
    assert said(caplog) == [
        "engine loop: the model draws random numbers in training (dropout), which graph cannot record"
    ]
