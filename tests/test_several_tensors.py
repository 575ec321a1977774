"""Specifies cuts that several tensors cross: a hidden state, a skip connection, and a mask that has no gradient."""

from typing import Any

import pytest
import torch
from conftest import BATCH, GENERAL, SEED, TOLD, TWO_PART_ONLY, agree, clients_of, images, run, simulation, trained
from in_process import deployment
from torch import Tensor, nn

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


def test_other_things_cannot_cross() -> None:
    with pytest.raises(
        CutError, match="a tuple cannot cross the cut; let the unit below it return a tensor, or a dict"
    ):
        vjp(lambda x: ((x, x), {}), [torch.ones(2)], None)
