"""Specifies cuts that several tensors cross: a hidden state, a skip connection, and a mask that has no gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import BATCH, GENERAL, SEED, TOLD, TWO_PART_ONLY, agree, clients_of, images, run, simulation, trained
from in_process import deployment
from torch import Tensor, nn

import cutlayer as cl
from cutlayer import methods, optim
from cutlayer.core.calculus import vjp
from cutlayer.engines.graph.engine import Graph
from cutlayer.engines.graph.recorder import Again
from cutlayer.errors import ConfigError, CutError
from cutlayer.methods import global_model
from cutlayer.split import Split

WIDTH = 6
ONE, FORK, BLOCK, JOIN = 1, 2, 3, 4  # cuts: after `stem` one tensor crosses, after `fork` and `block` three
OPT = optim.sgd(0.05, momentum=0.9)


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x.flatten(1)))


class Fork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": torch.tanh(self.fc(x)), "skip": x, "mask": x > 0}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, at: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**at, "hidden": torch.tanh(self.fc(at["hidden"])) * at["mask"]}


class Join(nn.Module):
    def forward(self, at: dict[str, Tensor]) -> Tensor:
        return at["hidden"] + at["skip"]


class Forked(nn.Module):
    """A residual network whose skip connection and mask cross the cuts inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fork, self.block, self.join, self.head = Stem(), Fork(), Block(), Join(), nn.Linear(WIDTH, 10)

    def units(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((name, (name,)) for name, _ in self.named_children())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(self.block(self.fork(self.stem(x)))))


def forked(cut: int, head: int | None = None) -> Split:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Split(Forked().double(), cut, head=head)


def built(name: str, cut: int, head: int | None = None, **options: Any) -> methods.Method:
    return methods.build(name, forked(cut, head), OPT, OPT, **{**TOLD.get(name, {}), **options})


def values(sim: Any) -> dict[str, Tensor]:
    return sim.method.model.export(global_model(run(sim)))


ABLE = tuple(name for name in GENERAL if name != "fsl_sage")


@pytest.mark.parametrize("cut", (FORK, BLOCK))
def test_what_crosses_does_not_change_what_is_trained(cut: int) -> None:
    """SFL-V1 does not depend on the cut: one tensor crosses below the fork, three inside it."""
    agree(trained(built("sfl_v1", cut)), trained(built("sfl_v1", ONE)), 1e-12)


@pytest.mark.parametrize("name", ABLE)
def test_vmap_and_graph_give_the_loop_engines_numbers(name: str) -> None:
    loop = simulation(built(name, FORK))
    vmap, graph = simulation(built(name, FORK), engine="vmap"), simulation(built(name, FORK))
    graph.backend.engine = Graph(Again(torch.device("cpu")), 5)
    expected = values(loop)
    for sim in (vmap, graph):
        agree(values(sim), expected, 1e-12)
        assert sim.ledger.totals == loop.ledger.totals


@pytest.mark.parametrize("name", [name for name in ABLE if name not in TWO_PART_ONLY])
def test_several_tensors_cross_at_the_head_of_a_u_shape(name: str) -> None:
    agree(trained(built(name, ONE, BLOCK), engine="vmap"), trained(built(name, ONE, BLOCK)), 1e-12)
    if name == "sfl_v1":
        agree(trained(built(name, ONE, BLOCK)), trained(built(name, ONE, JOIN)), 1e-12)


@pytest.mark.parametrize("name", ("sfl_v1", "mergesfl", "hosfl"))
def test_devices_give_the_loop_engines_numbers(name: str) -> None:
    rounds = deployment(built(name, FORK), images(), clients_of(), batching=BATCH, seed=SEED)
    agree(values(rounds), values(simulation(built(name, FORK))), 1e-12)


def test_the_mask_goes_up_and_has_no_gradient() -> None:
    """Per sample up: two rows of float64 and a row of bools, and the label; down: the gradients of the two rows."""
    sim = simulation(built("sfl_v1", FORK))
    run(sim, rounds=1)
    assert sim.ledger.totals["up_activations"] == sim.ledger.samples * (2 * 8 * WIDTH + WIDTH)
    assert sim.ledger.totals["down_gradients"] == sim.ledger.samples * 2 * 8 * WIDTH


def test_a_pullback_takes_the_gradients_that_there_are() -> None:
    split, x = forked(FORK), images().x[:3]
    client, server = split.initial()
    z, pull = vjp(split.lower, [client, x], None)
    h, pull_s = vjp(split.upper, [server, z], 1)
    grads = pull_s(torch.ones_like(h))
    assert grads.cut.keys() == {"hidden", "skip"}
    whole, pull_whole = vjp(split.whole, [client.joined(server), x], None)
    assert torch.equal(h, whole)
    expected = pull_whole(torch.ones_like(whole)).params
    agree({**pull(grads.cut).params, **grads.params}, expected, 1e-12)


def test_fsl_sage_refuses_several_tensors() -> None:
    with pytest.raises(
        ConfigError, match="FSL-SAGE's auxiliary model reads one tensor at the cut, but here hidden, skip"
    ):
        run(simulation(built("fsl_sage", FORK)))


# -- several outputs --------------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    logits: Tensor
    inside: Tensor


class Several(nn.Module):
    """Gives its logits and its hidden state, in some form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.form = nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10), form

    def forward(self, x: Tensor) -> Any:
        h = self.b(torch.tanh(self.a(x.flatten(1))))
        return self.form(self.c(h), h)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, b], lambda out: out),
    "named tuple": (Outputs, lambda out: (out.logits, out.inside)),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda out: (out["a"], out["b"])),
    "nested": (lambda a, b: (a, {"b": [b]}), lambda out: (out[0], out[1]["b"][0])),
}


def several(form: str, cut: int | str = "a", head: int | str | None = None) -> Split:
    make, take = FORMS[form]

    def loss(out: Any, y: Tensor) -> Tensor:
        logits, inside = take(out)
        return F.cross_entropy(logits, y) + 0.1 * inside.square().mean()

    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Split(Several(make).double(), cut, head=head, loss=loss)


def train(split: Split, form: str, engine: str) -> Any:
    made = methods.build("sfl_v1", split, OPT, OPT)
    metrics = {"accuracy": lambda out, y: cl.accuracy(FORMS[form][1](out)[0], y)}
    parts = cl.iid(len(images()), 2, key=0)
    return cl.train(
        made, images(), parts, rounds=2, batching=BATCH, engine=engine, test=images(), metrics=metrics, seed=0
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_output_may_be_several_tensors(form: str) -> None:
    expected = train(several("dict"), "dict", "loop")
    assert expected.history[-1]["loss"] < expected.history[0]["loss"]
    for engine in ("loop", "vmap"):
        found = train(several(form), form, engine)
        agree(found.state_dict, expected.state_dict, 1e-12)
        assert found.history[-1]["test_accuracy"] == expected.history[-1]["test_accuracy"]


def test_the_output_of_a_u_shape_may_be_several_tensors() -> None:
    found = train(several("tuple", "a", "c"), "tuple", "vmap")
    agree(found.state_dict, train(several("tuple"), "tuple", "loop").state_dict, 1e-12)


def test_other_things_cannot_cross() -> None:
    split, few = several("tuple"), images().take(range(3))
    split.rehearse(few.x, few.y)
    message = "a tuple cannot cross the cut; let the unit below it return a tensor, or a dict of tensors"
    for other in (split.with_cut(split.num_units), split.with_cut("a", head=split.num_units)):
        with pytest.raises(CutError, match=message):
            other.rehearse(few.x, few.y)
