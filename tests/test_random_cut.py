"""Specifies the random cut: what it changes, which server holds a layer after each round, and what a move costs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NUM_UNITS, agree, distance, resnet, run, simulation, trained
from stopping import SMALL, outcome, stopped, unbroken
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.state import State
from cutlayer.errors import ConfigError
from cutlayer.methods.random_cut import RandomCut
from cutlayer.methods.splitfed import SplitFed
from cutlayer.runs.config import Choice
from cutlayer.runs.run import Folder, execute
from cutlayer.split import Split

ENGINES = ("loop", "vmap")
PLAIN, MOMENTUM = optim.sgd(0.1), optim.sgd(0.05, momentum=0.9)


def smofi(cut: int = 1, head: int | None = None, **options: Any) -> SplitFed:
    """SMoFi at a fixed cut."""
    split = Split(resnet(), cut, head=head)
    method = methods.smofi(model=split, client_opt=MOMENTUM, server_opt=MOMENTUM, **options)
    assert isinstance(method, SplitFed)
    return method


def random_cut(cut: int = 1, head: int | None = None, **options: Any) -> RandomCut:
    split = Split(resnet(), cut, head=head)
    method = methods.smofi(model=split, client_opt=MOMENTUM, server_opt=MOMENTUM, **{"random_cut": (1, 3), **options})
    assert isinstance(method, RandomCut)
    return method


def cuts_of(states: Sequence[State]) -> list[int]:
    return [1 + state.memory.cut for state in states]


def states_of(method: RandomCut, rounds: int, **options: Any) -> list[State]:
    sim = simulation(method, **options)
    states = [sim.start()]
    for _ in range(rounds):
        states.append(sim.round(states[-1]))
    return states[1:]


@cache
def drawn() -> list[int]:
    return cuts_of(states_of(random_cut(), 4))


def test_the_cuts_are_drawn_anew_each_round() -> None:
    assert len(set(drawn())) == 3
    assert cuts_of(states_of(random_cut(cut=5), 4)) == drawn()  # whatever the model's own cut


@pytest.mark.parametrize(("cut", "head"), [(0, None), (2, None), (2, 4), (4, 4), (NUM_UNITS, None)])
def test_a_range_of_one_cut_is_that_cut(cut: int, head: int | None) -> None:
    fixed = trained(smofi(cut=cut, head=head))
    agree(trained(random_cut(cut=0, head=head, random_cut=(cut, cut))), fixed, 0)


@pytest.mark.parametrize("head", (None, 4))
def test_without_alignment_the_cuts_do_not_matter(head: int | None) -> None:
    fixed = trained(smofi(align=False, beta=0.4), rounds=4)
    agree(trained(random_cut(head=head, align=False, beta=0.4), rounds=4), fixed)
    assert distance(trained(random_cut(head=head), rounds=4), trained(smofi(head=head), rounds=4)) > 1e-3


@pytest.mark.parametrize("head", (None, 4))
def test_every_value_is_at_one_place_after_every_round(head: int | None) -> None:
    everything = set(resnet().state_dict())
    for state in states_of(random_cut(head=head), 4):
        client, server = state.client.tree, state.server.tree
        lower, upper = Split(resnet(), 1 + state.memory.cut, head=head).initial()
        assert [values.keys() for values in client] == [values.keys() for values in lower]
        assert [values.keys() for values in server] == [values.keys() for values in upper]
        assert state.memory.method.client.tree.keys() == client.params.keys()
        assert state.memory.method.server.tree.keys() == server.params.keys()
        names = [name for model in (client, server) for values in model for name in values]
        assert (len(names), set(names)) == (len(everything), everything)


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_change_servers_as_aggregates_and_clients_hear_nothing_of_it(engine: str) -> None:
    """With each layer goes its share of the global momentum; running statistics count nothing."""
    sim = simulation(random_cut(), engine=engine)
    run(sim, 4)
    size = [tree.num_bytes(Split(resnet(), cut).initial()[0].params) for cut in range(NUM_UNITS + 1)]
    moved = sum(abs(size[b] - size[a]) for a, b in zip([1, *drawn()], drawn(), strict=False))
    totals = sim.ledger.totals
    assert totals["inter_server_sync"] == 2 * moved > 0
    assert totals["up_model"] == totals["down_model"] == 5 * sum(size[cut] for cut in drawn())
    fixed = simulation(smofi())
    run(fixed, 4)
    assert totals.keys() - fixed.ledger.totals.keys() == {"inter_server_sync"}
    assert sim.ledger.trips == fixed.ledger.trips


def test_a_run_with_random_cuts_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    spelled = replace(SMALL, method=Choice("smofi", {"random_cut": [0, 3]}))
    folder = stopped(spelled, Folder(tmp_path / "stopped"))
    execute(spelled, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(spelled, tmp_path))


def test_a_layer_that_one_client_alone_trained_does_not_change_servers() -> None:
    """Its values would tell of that client: refused before anything is trained."""
    with pytest.raises(ConfigError, match=r"^this method needs at least 2 clients a round, but per_round is 1$"):
        states_of(random_cut(), 4, per_round=1)
    states_of(random_cut(random_cut=(2, 2)), 2, per_round=1)  # one cut alone moves nothing


NOISE = {"source": torch.randn_like}


class Noisy(nn.Linear):
    """A layer whose random numbers only a rehearsal brings to light."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + NOISE["source"](x)


@pytest.mark.parametrize("cuts", (None, (1, 3)))
def test_random_numbers_are_functions_of_the_seed_at_every_cut(cuts: tuple[int, int] | None) -> None:
    def found(global_seed: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Noisy(8, 8), Noisy(8, 8), nn.Linear(8, 10)).double()
        method = methods.smofi(model=Split(net, 2), client_opt=PLAIN, server_opt=PLAIN, random_cut=cuts)
        sim = simulation(method)
        torch.manual_seed(global_seed)  # torch's own generator plays no part
        return method.model.export(methods.global_model(run(sim, 4)))

    with torch.random.fork_rng():
        agree(found(1), found(2), 0)


# -- Mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", ((3, 1), (-1, 2), (0, 6), (2,), (1, 2, 3)))
def test_a_range_that_makes_no_sense(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        random_cut(random_cut=cuts)
    assert str(caught.value) == (
        f"random_cut is {list(cuts)}; it must be the lowest and the highest number of units at the client, from 0 to 5"
    )


def test_a_random_cut_of_a_u_shape_ends_at_its_head() -> None:
    with pytest.raises(ConfigError, match=r"from 0 to 3$"):
        random_cut(head=3, random_cut=(1, 4))


@pytest.mark.parametrize("cuts", (3, "layer1", ("stem", "layer1"), (0.5, 2)))
def test_a_random_cut_is_two_whole_numbers(cuts: Any) -> None:
    with pytest.raises(ConfigError, match=r"random_cut is .* it must be the lowest and the highest number of units"):
        methods.build("smofi", Split(resnet(), 1), MOMENTUM, MOMENTUM, random_cut=cuts)
