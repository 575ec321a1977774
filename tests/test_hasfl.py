"""Specifies HASFL's training: which layers are whose, when they move, what the cuts may change, and what crosses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    NUM_UNITS,
    SIZES,
    agree,
    clients_of,
    distance,
    images,
    resnet,
    round_key,
    run,
    sgd_by_hand,
    simulation,
)
from hasfl_by_hand import World, averaged, mean
from stopping import SMALL, outcome, stopped, unbroken
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.state import State
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError, CutError
from cutlayer.methods.hasfl import Hasfl
from cutlayer.pieces.recut import regrown
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.problem import Costs
from cutlayer.planning.profile import profile
from cutlayer.runs.config import Choice
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

LR = 0.1
PLAIN, MOMENTUM = optim.sgd(LR), optim.sgd(0.05, momentum=0.9)
ENGINES = ("loop", "vmap")
CUTS = (1, 3, 2, 1, 2)
BATCHES = (4, 1, 2, 5, 3)
EQUAL = (3,) * 5
NUM = len(SIZES)
EVERYONE = tuple(range(NUM))
WORLD = World(images(), clients_of(), LR)


def hasfl(
    cuts: Any = CUTS,
    batches: Any = BATCHES,
    *,
    net: nn.Module | None = None,
    cut: int = 1,
    head: int | None = None,
    interval: int = 3,
    opt: optim.Transform = PLAIN,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    **options: Any,
) -> Hasfl:
    split = Split(net or resnet("group"), cut, head=head, loss=loss)
    return methods.hasfl(
        model=split, client_opt=opt, server_opt=opt, interval=interval, batches=batches, cuts=cuts, **options
    )


def costs(net: nn.Module) -> Costs:
    return Costs.of(profile(net, torch.zeros(2, 1, 8, 8, dtype=torch.float64)))


def values(state: State) -> dict[str, Tensor]:
    model = methods.global_model(state)
    return {**model.params, **model.buffers}


def after(method: Hasfl, *args: Any, rounds: int = 2, **options: Any) -> dict[str, Tensor]:
    return values(run(simulation(method, *args, **options), rounds))


def report(state: State) -> dict[str, float]:
    return {name: float(value) for name, value in state.report.tree._asdict().items()}


# -- data-parallel SGD -----------------------------------------------------------------------------------------------


@cache
def in_parallel(norm: str, rounds: int, interval: int, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    steps = (step for number in range(rounds) for step in WORLD.batches(number, interval, sizes))
    return WORLD.data_parallel(resnet(norm), steps)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("norm", ("group", "batch"))
@pytest.mark.parametrize("cuts", (CUTS, (2,) * 5, (1, 2, 3, 4, 5), "fixed"), ids=str)
def test_aggregated_at_every_step_it_is_data_parallel_sgd(cuts: Any, norm: str, engine: str) -> None:
    """Each client counts the same, whatever the size of its batch."""
    found = after(hasfl(cuts, net=resnet(norm), interval=1), rounds=3, engine=engine)
    agree(found, in_parallel(norm, 3, 1, BATCHES))


def three_of(number: int) -> Walk:
    return Walk(Batching(size=3), clients_of((20,)).clients, round_key(number), {})


@pytest.mark.parametrize("cut", (1, 4))
def test_one_client_alone_trains_as_if_nothing_was_split(cut: int) -> None:
    alone = World(images(20), clients_of((20,)), LR)
    found = after(hasfl("fixed", (3,), net=resnet(), cut=cut, interval=4), alone.data, alone.partition)
    batches = [walk.samples(0, step) for walk in map(three_of, range(2)) for step in range(4)]
    agree(found, sgd_by_hand(resnet(), alone.data, batches, LR))


@pytest.mark.parametrize("interval", (1, 2, 4))
def test_with_nothing_at_the_devices_it_is_data_parallel_sgd_for_every_interval(interval: int) -> None:
    found = after(hasfl("fixed", net=resnet(), cut=0, interval=interval))
    agree(found, in_parallel("batch", 2, interval, BATCHES))


def test_equal_batches_move_the_common_layers_as_one_large_batch_and_unequal_ones_do_not() -> None:
    def apart(sizes: tuple[int, ...]) -> float:
        found = after(hasfl(CUTS, sizes, interval=1), rounds=1)
        (step,) = WORLD.batches(0, 1, sizes)
        return distance(found, sgd_by_hand(resnet("group"), images(), [np.concatenate(step)], LR))

    assert apart(EQUAL) < 1e-12
    assert apart(BATCHES) > 1e-3


# -- between aggregations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("norm", ("group", "batch"))
@pytest.mark.parametrize(("cuts", "deepest"), [(CUTS, 3), ((4, 1, 1, 1, 1), 4), ((NUM_UNITS, 2, 1, 2, 1), NUM_UNITS)])
def test_layers_up_to_the_deepest_cut_are_each_devices_own_until_the_round_ends(
    cuts: tuple[int, ...], deepest: int, norm: str, engine: str
) -> None:
    found = after(hasfl(cuts, net=resnet(norm)), engine=engine)
    agree(found, WORLD.rounds(resnet(norm), [deepest] * 2, 3, BATCHES))


def test_between_aggregations_the_devices_mean_follows_their_mean_gradient() -> None:
    """Rounds of 1, 2, 3 and 4 steps show where the mean is after each of them."""
    nets, now = [resnet("group") for _ in EVERYONE], resnet("group").state_dict()
    for number, samples in enumerate(WORLD.batches(0, 4, BATCHES)):
        later = after(hasfl(interval=number + 1), rounds=1)
        seen = [WORLD.told(net, own).gradient for net, own in zip(nets, samples, strict=True)]
        for name, value in later.items():
            agree(value - now[name], -LR * mean([gradient[name] for gradient in seen]))
        WORLD.train(nets, iter([samples]), deepest=3)
        now = later
    apart = [distance(net.state_dict(), nets[0].state_dict()) for net in nets[1:]]
    assert min(apart) > 1e-3  # nobody has heard of the others yet


# -- what the cuts change ----------------------------------------------------------------------------------------------


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        halves = (nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 10))
        super().__init__(nn.Flatten(), *halves)


@cache
def dropping() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Dropping().double()


WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "running statistics": {"net": resnet(), "opt": PLAIN},
    "momentum": {"net": resnet(), "opt": MOMENTUM},
    "adam": {"opt": optim.adam(1e-3)},
    "dropout": {"net": dropping(), "opt": MOMENTUM},
    "u-shape": {"net": resnet(), "head": 4, "opt": MOMENTUM},
}


def vectors(deepest: int, seed: int, num: int = 3) -> list[tuple[int, ...]]:
    """Cuts at random, somebody's the deepest."""
    random = np.random.default_rng(seed)
    drawn = random.integers(1, deepest + 1, (num, NUM))
    drawn[np.arange(num), random.integers(0, NUM, num)] = deepest
    return [tuple(row) for row in drawn.tolist()]


def everything(state: State) -> list[Tensor]:
    return tree.tensors((state.client.tree, state.server.tree, state.report.tree))


@pytest.mark.parametrize("deepest", (2, 4))
@pytest.mark.parametrize("world", WORLDS)
def test_cuts_below_the_deepest_one_change_no_bit(world: str, deepest: int) -> None:
    same = run(simulation(hasfl((deepest,) * NUM, **WORLDS[world])))
    for cuts in vectors(deepest, seed=deepest):
        other = run(simulation(hasfl(cuts, **WORLDS[world])))
        for a, b in zip(everything(same), everything(other), strict=True):
            assert torch.equal(a, b), cuts


@pytest.mark.parametrize("world", sorted(WORLDS.keys() - {"dropout"}))
def test_on_vmap_they_change_no_digit(world: str) -> None:
    same = run(simulation(hasfl((3,) * NUM, **WORLDS[world])))
    for cuts in vectors(3, seed=0, num=2):
        other = run(simulation(hasfl(cuts, **WORLDS[world]), engine="vmap"))
        agree(everything(other), everything(same))


def test_the_deepest_cut_matters_unless_every_step_is_aggregated() -> None:
    shallow, deep = ((2, 1, 1, 1, 1), (4, 1, 1, 1, 1))
    assert distance(after(hasfl(shallow)), after(hasfl(deep))) > 1e-4
    agree(after(hasfl(shallow, interval=1)), after(hasfl(deep, interval=1)))


def test_equal_cuts_leave_nothing_between_them() -> None:
    equal, unequal = (simulation(hasfl(cuts, cut=3)) for cuts in ((3,) * NUM, CUTS))
    state = run(equal)
    assert equal.ledger.totals["inter_server_model"] == equal.ledger.totals["inter_server_sync"] == 0
    lower, upper = Split(resnet("group"), 3).initial()
    assert state.client.tree.params.keys() == lower.params.keys()
    assert state.server.tree.params.keys() == upper.params.keys()
    run(unequal)
    assert unequal.ledger.totals["inter_server_model"] > 0


# -- plans that change -------------------------------------------------------------------------------------------------


def rounds_of(sim: Simulation, num: int) -> list[State]:
    states = [sim.start()]
    for _ in range(num):
        states.append(sim.round(states[-1]))
    return states[1:]


def cuts_of(state: State) -> dict[int, int]:
    return dict(state.memory.plan.cuts)


def model_bytes(net: nn.Module) -> list[int]:
    """Of the layers up to each cut."""
    return [tree.num_bytes(Split(net, cut).initial()[0].params) for cut in range(NUM_UNITS + 1)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("norm", ("group", "batch"))
def test_a_new_deepest_cut_moves_layers_between_the_servers_and_changes_none(norm: str, engine: str) -> None:
    net = resnet(norm)
    sim = simulation(hasfl("random", net=net, costs=costs(net)), engine=engine)
    states = rounds_of(sim, 4)
    plans = [cuts_of(state) for state in states]
    deepest = [max(plan.values()) for plan in plans]
    assert len(set(deepest)) > 1 and len({tuple(plan.values()) for plan in plans}) == 4
    agree(values(states[-1]), WORLD.rounds(net, deepest, 3, BATCHES))

    size = model_bytes(net)
    moved = sum(abs(size[b] - size[a]) for a, b in zip([1, *deepest], deepest, strict=False))  # the model's own cut
    between = sum(size[d] - size[c] for d, plan in zip(deepest, plans, strict=True) for c in plan.values())
    own = sum(size[c] for plan in plans for c in plan.values())
    totals = sim.ledger.totals
    assert moved > 0 and between > 0
    assert totals["inter_server_sync"] == moved + between
    assert totals["inter_server_model"] == between
    assert totals["up_model"] == totals["down_model"] == own
    for state, cut in zip(states, deepest, strict=True):
        lower, upper = Split(net, cut).initial()
        assert state.server.tree.count == 3 * state.round  # the common optimiser goes on
        assert [group.keys() for group in state.client.tree] == [group.keys() for group in lower]
        assert [group.keys() for group in state.server.tree.model] == [group.keys() for group in upper]


def test_the_common_layers_keep_their_momentum_and_new_ones_start_without() -> None:
    net = resnet()
    model = Split(net, 2).initial()[1]
    part = MOMENTUM.begin(model, 0)
    part = part._replace(moments=tree.map(torch.ones_like, part.moments), count=7)
    wider = regrown(MOMENTUM, part, Split(net, 1).initial()[1], 3)
    fresh = Split(net, 1).initial()[1].params.keys() - model.params.keys()
    assert wider.count == 7 and fresh
    for name, moment in wider.moments["momentum"].items():
        assert torch.equal(moment, torch.zeros_like(moment) if name in fresh else torch.ones_like(moment)), name
    narrower = regrown(MOMENTUM, wider, Split(net, 4).initial()[1], 3)
    assert narrower.moments["momentum"].keys() == Split(net, 4).initial()[1].params.keys()
    assert all(bool((moment == 1).all()) for moment in narrower.moments["momentum"].values())


def test_a_sample_of_clients_has_a_deepest_cut_of_its_own() -> None:
    sim = simulation(hasfl(), per_round=2)
    seen = []
    for state in rounds_of(sim, 6):
        plan = cuts_of(state)
        assert len(plan) == 2 and all(CUTS[j] == cut for j, cut in plan.items())
        seen.append(max(plan.values()))
        assert state.memory.deepest == seen[-1]
    assert len(set(seen)) > 1


@pytest.mark.parametrize("cuts", ("random", CUTS), ids=str)
def test_layers_of_a_single_client_do_not_change_servers(cuts: Any) -> None:
    """They would tell of that client: refused before anything is trained."""
    with pytest.raises(ConfigError, match=r"^this method needs at least 2 clients a round, but per_round is 1$"):
        simulation(hasfl(cuts, costs=costs(resnet("group"))), per_round=1)
    run(simulation(hasfl((3,) * NUM), per_round=1), 1)  # one cut alone moves nothing
    run(simulation(hasfl("fixed"), per_round=1), 1)


def test_a_plan_lasts_as_long_as_it_is_told() -> None:
    net = resnet("group")
    method = hasfl("random", "random", net=net, costs=costs(net), interval=1, replan_every=3, random_batch=(2, 5))
    plans = [state.memory.plan for state in rounds_of(simulation(method), 7)]
    assert plans[0] == plans[1] == plans[2] != plans[3] == plans[4] == plans[5] != plans[6]
    assert {b for plan in plans for b in plan.batches.values()} <= {2, 3, 4, 5}


# -- what crosses ------------------------------------------------------------------------------------------------------

ACTIVATIONS = {1: 2 * 8 * 8, 2: 2 * 8 * 8, 3: 4 * 4 * 4, 4: 8 * 2 * 2}  # a sample's, after each unit
INTERVAL, ROUNDS = 3, 2


@pytest.mark.parametrize("head", (None, 4))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_costs_its_batches_at_each_ones_cut_and_its_layers_twice(engine: str, head: int | None) -> None:
    net = resnet(dtype=torch.float32)
    sim = simulation(hasfl(net=net, cut=3, head=head), images(dtype=torch.float32), engine=engine)
    run(sim, ROUNDS)
    models = [tree.num_bytes(Split(net, cut, head=head).initial()[0].params) for cut in range(4)]
    for j, (cut, batch) in enumerate(zip(CUTS, BATCHES, strict=True)):
        samples = INTERVAL * batch
        crossed = {"up_activations": 4 * samples * ACTIVATIONS[cut], "down_gradients": 4 * samples * ACTIVATIONS[cut]}
        if head is None:
            crossed["up_labels"] = 8 * samples
        else:
            at_head = 4 * samples * ACTIVATIONS[head]
            crossed |= {"down_activations": at_head, "up_gradients": at_head, "up_scalars": 4 * INTERVAL}
        crossed |= {"up_model": models[cut], "down_model": models[cut]}
        crossed["down_settings"] = 8 + 8  # the round's number, and the cut
        assert sim.ledger.per_client[j] == {name: ROUNDS * size for name, size in crossed.items()}
        assert sim.ledger.trips[j] == ROUNDS * (INTERVAL * (1 if head is None else 2) + 1)
    between = ROUNDS * sum(models[3] - models[cut] for cut in CUTS)
    assert sim.ledger.totals["inter_server_model"] == sim.ledger.totals["inter_server_sync"] == between > 0
    assert sim.ledger.samples == ROUNDS * INTERVAL * sum(BATCHES)


def test_no_batch_is_larger_than_a_clients_data() -> None:
    sim = simulation(hasfl(batches=(4, 1, 2, 5, 64), interval=2))
    state = run(sim, 1)
    assert state.memory.plan.batches == {0: 4, 1: 1, 2: 2, 3: 5, 4: 3}
    assert sim.ledger.samples == 2 * sum(BATCHES)


# -- clients that stop -------------------------------------------------------------------------------------------------


def spoilt(clients: Sequence[int]) -> Arrays:
    """These clients have nothing but NaN."""
    data = images()
    x = data.x.clone()
    for j in clients:
        x[torch.from_numpy(clients_of().clients[j])] = torch.nan
    return Arrays(x=x, y=data.y, num_classes=10)


PLACEMENTS = [(CUTS, None), ((3,) * NUM, None), ((3, 1, 1, 1, 1), None), (CUTS, 4)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("bad", ((1,), (0, 3)))
@pytest.mark.parametrize(("cuts", "head"), PLACEMENTS)
def test_a_client_that_is_not_finite_stops_alone(
    cuts: tuple[int, ...], head: int | None, bad: tuple[int, ...], engine: str
) -> None:
    """The common layers follow the mean over the rest; its own stay where they were."""
    sim = simulation(hasfl(cuts, net=resnet(), head=head), spoilt(bad), engine=engine)
    state = sim.round(sim.start())
    assert (report(state)["stopped"], report(state)["batches"]) == (len(bad), 3 * (NUM - len(bad)))
    if head is None:
        nets = [resnet() for _ in EVERYONE]
        WORLD.train(nets, WORLD.batches(0, 3, BATCHES), 3, bad)
        agree(values(state), averaged(nets))
    assert all(bool(value.isfinite().all()) for value in everything(state))


@pytest.mark.parametrize("engine", ENGINES)
def test_when_all_stop_nothing_moves_and_the_next_round_starts_again(engine: str) -> None:
    sim = simulation(hasfl(net=resnet()), spoilt(EVERYONE), engine=engine)
    first = sim.round(sim.start())
    agree(values(first), values(sim.start()))
    assert report(first) == {"loss": 0, "batches": 0, "stopped": NUM}
    sim.job.data = images()
    second = sim.round(first)
    assert report(second)["stopped"] == 0
    assert distance(values(second), values(first)) > 1e-3


def steep_nines(out: Tensor, y: Tensor) -> Tensor:
    """Finite for class 9, although its gradient is not."""
    nothing = 0 * out.sum()
    return F.cross_entropy(out, y) + torch.where((y == 9).any(), nothing, nothing + 1).sqrt()


def endless_nines(out: Tensor, y: Tensor) -> Tensor:
    """Infinite for class 9, although its gradient is not."""
    return F.cross_entropy(out, y) + torch.where(y == 9, torch.inf, 0.0).sum()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cuts", (CUTS, (3,) * NUM, (1, 3, 3, 3, 3)), ids=str)
@pytest.mark.parametrize("loss", (steep_nines, endless_nines))
def test_a_loss_or_a_gradient_alone_that_is_not_finite_stops_its_client_everywhere(
    loss: Callable[[Tensor, Tensor], Tensor], cuts: tuple[int, ...], engine: str
) -> None:
    data, bad = images(), 1
    y = data.y.clamp(max=8)
    y[torch.from_numpy(clients_of().clients[bad])] = 9
    data = Arrays(x=data.x, y=y, num_classes=10)
    sim = simulation(hasfl(cuts, loss=loss), data, engine=engine)
    state = sim.round(sim.start())
    nets, world = [resnet("group") for _ in EVERYONE], World(data, clients_of(), LR)
    world.train(nets, world.batches(0, 3, BATCHES), 3, bad=(bad,))
    agree(values(state), averaged(nets))
    assert report(state)["stopped"] == 1


# -- a run that stops --------------------------------------------------------------------------------------------------

PLANNED = replace(
    SMALL,
    method=Choice("hasfl", {"interval": 3}),
    devices=Choice("table1"),
    batching=Batching(size=8),
    rounds=4,
)
RANDOM = replace(PLANNED, method=Choice("hasfl", {"interval": 3, "batches": "random", "cuts": "random"}))


@pytest.mark.parametrize("spelled", (PLANNED, RANDOM), ids=("planned", "random"))
def test_a_run_goes_on_as_if_it_had_not_stopped(spelled: Any, tmp_path: Path) -> None:
    folder = stopped(spelled, Folder(tmp_path / "stopped"), 2)
    execute(spelled, folder, resume=True)
    assert outcome(folder) == outcome(unbroken(spelled, tmp_path))


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("interval", "replan_every"))
@pytest.mark.parametrize("value", (0, -1, 1.5, True))
def test_counts_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        hasfl(**{name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}, but it must be a whole number")


@pytest.mark.parametrize(
    ("batching", "given"), [(Batching(size=4, steps=2), "steps"), (Batching(size=4, epochs=2), "epochs")]
)
def test_the_interval_says_how_long_a_round_is(batching: Batching, given: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulation(hasfl(), batching=batching)
    assert str(caught.value) == (
        f"this method counts the mini-batches of a round itself; leave {given} out of the batching"
    )


def test_a_joint_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^HASFL "):
        hasfl(opt=optim.sgd(0.1, clip=0.5, clip_scope="joint"))


def test_cuts_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(CutError, match=r"^cut 9 is out of range: "):
        run(simulation(hasfl((9, 1, 1, 1, 1))), 1)


# -- who can take part ----------------------------------------------------------------------------------------------


def test_a_batch_of_one_that_a_model_cannot_take_is_told_of_before_training() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
    opt = optim.sgd(0.1)
    for batches in ("random", (4, 4, 1, 4, 3)):
        method = methods.hasfl(model=Split(net, 2), client_opt=opt, server_opt=opt, batches=batches, cuts="fixed")
        with pytest.raises(ConfigError, match="Expected more than 1 value per channel"):
            simulation(method)
    method = methods.hasfl(model=Split(net, 2), client_opt=opt, server_opt=opt, batches=(4, 4, 2, 4, 3), cuts="fixed")
    run(simulation(method), rounds=1)


@pytest.mark.parametrize(("batch", "looks"), [(3, False), (4, True)])
def test_halves_of_a_batch_are_normalised_with_two_samples_or_more(batch: int, looks: bool) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)).double()
    opt, devices = optim.sgd(0.1), Devices(clients=(Device(1e9, 1e6, 1e6),) * 5, server=1e9)
    costs = Costs.of(profile(net, images().x[:1], optimiser_slots=0))
    method = methods.hasfl(
        model=Split(net, 2), client_opt=opt, server_opt=opt, batches=(batch,) * 5, devices=devices, costs=costs
    )
    sim = simulation(method, images(100), clients_of((20,) * 5))
    first = sim.round(sim.start())
    assert (method.metrics(sim.round(first))["bound"] != method.metrics(first)["bound"]) == looks


def test_one_client_that_is_left_over_is_told_of() -> None:
    costs = Costs.of(profile(resnet(), images().x[:1], optimiser_slots=0))
    small = Device(1e9, 1e6, 1e6, memory=1.0)
    devices = Devices(clients=(Device(1e9, 1e6, 1e6), small, small, small, small), server=1e9)
    opt = optim.sgd(0.1)
    method = methods.hasfl(
        model=Split(resnet(), 2), client_opt=opt, server_opt=opt, batches="random", cuts="random", devices=devices,
        costs=costs,
    )  # fmt: skip
    sim = simulation(method)
    with pytest.raises(ConfigError, match=r"^only client 0 can take part \(infeasible_memory: client 1 is left out"):
        sim.round(sim.start())


def test_estimates_need_two_clients_a_round() -> None:
    costs = Costs.of(profile(resnet(), images().x[:1], optimiser_slots=0))
    devices = Devices(clients=(Device(1e9, 1e6, 1e6),) * 5, server=1e9)
    opt = optim.sgd(0.1)
    method = methods.hasfl(
        model=Split(resnet(), 2), client_opt=opt, server_opt=opt, cuts="fixed", devices=devices, costs=costs
    )
    with pytest.raises(ConfigError, match="this method needs at least 2 clients a round, but per_round is 1"):
        simulation(method, per_round=1)


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        ({"batches": (4,) * 6, "cuts": "fixed"}, "the method's lists are for 6 clients, but there are 5"),
        ({"batches": "fixed", "cuts": (1,) * 4}, "the method's lists are for 4 clients, but there are 5"),
        (
            {"batches": (4,) * 5, "cuts": (1,) * 4},
            "hasfl has 5 batches and 4 cuts; give one of each for each client",
        ),
    ],
)
def test_lists_are_for_all_clients(lists: dict[str, Any], told: str) -> None:
    opt = optim.sgd(0.1)
    with pytest.raises(ConfigError) as caught:
        simulation(methods.hasfl(model=Split(resnet(), 1), client_opt=opt, server_opt=opt, **lists))
    assert str(caught.value) == told


def test_costs_may_be_a_profile() -> None:
    opt, devices = optim.sgd(0.1), Devices(clients=(Device(1e9, 1e6, 1e6),) * 5, server=1e9)
    table = profile(resnet(), images().x[:1], optimiser_slots=0)
    method = methods.hasfl(model=Split(resnet(), 2), client_opt=opt, server_opt=opt, devices=devices, costs=table)
    assert method.policy.costs is not None and method.policy.costs.forward.tolist() == Costs.of(table).forward.tolist()
