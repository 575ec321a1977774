"""Specifies FedProx, FedNAR, FedAvgM, SlowMo and FedNAG: FedAvg and one piece each, alone and in every combination."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
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
    run,
    simulation,
    trained,
    walk,
)
from one_weight import Weight, alike, mean_output, weight
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core.batches import Batching
from cutlayer.core.meter import Meter
from cutlayer.core.state import State
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods.fedavg import FedAvg
from cutlayer.methods.splitfed import SplitFed
from cutlayer.optim.schedules import cosine, exponential
from cutlayer.pieces.carry import AverageMoments
from cutlayer.pieces.outer import SlowMo
from cutlayer.runs import checkpoint
from cutlayer.split import Split

PLAIN, MOMENTUM = optim.sgd(0.1), optim.sgd(0.05, momentum=0.9)
NESTEROV = optim.sgd(0.05, momentum=0.9, nesterov=True)
ONE_STEP, FOUR_STEPS = Batching(size=4, steps=1), Batching(size=4, steps=4)
ALONE = {"partition": clients_of((20,)), "data": images(20)}


def result(name: str, opt: optim.Transform = MOMENTUM, cut: int = 1, **options: Any) -> dict[str, Tensor]:
    """Trained values; options of the simulation beside the method's own."""
    known = {"partition", "rounds", "batching", "data"}
    world = {key: options.pop(key) for key in known & set(options)}
    return trained(methods.build(name, Split(resnet(), cut), opt, opt, **options), **world)


def parameters(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values[name] for name, _ in resnet().named_parameters()}


# -- One weight, and gradients that are given --------------------------------------------------------------------------


def three_halves_square(out: Tensor, y: Tensor) -> Tensor:
    return 3 * (out[:, 0] - y).pow(2).mean() / 2


def scalar(
    name: str,
    opt: optim.Transform,
    slopes: Sequence[float] = (1.0,),
    *,
    rounds: int = 1,
    steps: int = 1,
    cut: int = 1,
    start: float = 0.0,
    y: float = 0.0,
    loss: Any = mean_output,
    **options: Any,
) -> list[State]:
    """The states after each round, with clients of 2, 6, 10 ... samples whose gradient of w is their slope."""
    sizes = [2 + 4 * k for k in range(len(slopes))]
    method = methods.build(name, Split(Weight(start), cut, loss=loss), opt, opt, **options)
    data = alike(slopes, [y] * len(sizes), sizes)
    sim = simulation(method, data, clients_of(sizes), batching=Batching(size=2, steps=steps))
    states = [sim.start()]
    for _ in range(rounds):
        states.append(sim.round(states[-1]))
    return states[1:]


def weights(states: Sequence[State]) -> list[float]:
    return [weight(methods.global_model(state)) for state in states]


# -- FedProx -----------------------------------------------------------------------------------------------------------


def test_fedprox_without_a_penalty_is_fedavg() -> None:
    agree(result("fedprox", mu=0.0), result("fedavg"), 0)
    assert distance(result("fedprox", mu=1.0), result("fedavg")) > 1e-3


@pytest.mark.parametrize("mu", (0.01, 100.0))
def test_the_first_step_of_fedprox_is_fedavgs(mu: float) -> None:
    agree(result("fedprox", mu=mu, batching=ONE_STEP), result("fedavg", batching=ONE_STEP), 0)


def test_fedprox_ends_between_the_optimum_and_the_start() -> None:
    """Of a/2 (w − c)² with a = 3, c = −1, w⁰ = 2 and μ = 0.5: (a c + μ w⁰)/(a + μ)."""
    world = {"steps": 300, "start": 2.0, "y": -1.0, "loss": three_halves_square}
    assert weights(scalar("fedprox", optim.sgd(0.1), mu=0.5, **world)) == pytest.approx([-2 / 3.5], abs=1e-12)


@pytest.mark.parametrize("cut", range(NUM_UNITS + 1))
def test_the_penalty_on_both_sides_of_any_cut_is_fedprox(cut: int) -> None:
    agree(result("sfl_v1", optim.sgd(0.05, momentum=0.9, proximal=0.5), cut), fedprox())


@cache
def fedprox() -> dict[str, Tensor]:
    return result("fedprox", mu=0.5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("sfl_v1", {}),
        ("smofi", {"beta": 0.0}),
        ("sfl_v2", {"server_opt_reset": "round"}),
        ("sfl_v1", {"sync": "epoch"}),
    ],
)
@pytest.mark.parametrize("cut", (0, 2))
def test_with_one_client_every_method_with_the_penalty_is_fedprox(cut: int, name: str, options: dict[str, Any]) -> None:
    found = result(name, optim.sgd(0.05, momentum=0.9, proximal=0.5), cut, **options, **ALONE)
    agree(found, result("fedprox", mu=0.5, **ALONE))


@pytest.mark.parametrize(("when", "kept"), [("never", True), ("round", False), ("step", False)])
def test_moments_that_start_over_are_no_part_of_the_state(when: str, kept: bool) -> None:
    opt = optim.sgd(0.05, momentum=0.9)
    method = methods.build("sfl_v2", Split(resnet(), 1), opt, opt, server_opt_reset=when)
    sim = simulation(method)
    for state in (sim.start(), run(sim, 1)):
        assert ("/server/tree/moments/momentum/fc.weight" in checkpoint.pack(state)[0]) == kept


@pytest.mark.parametrize(("name", "options"), [("sfl_v1", {"sync": "step"}), ("sfl_v2", {"server_opt_reset": "step"})])
def test_the_penalty_draws_to_the_rounds_start_also_where_optimisers_start_over(
    name: str, options: dict[str, Any]
) -> None:
    found = result(name, optim.sgd(0.1, proximal=0.5), 0, **options, **ALONE)
    agree(found, result("fedprox", PLAIN, mu=0.5, **ALONE))


# -- FedNAR ------------------------------------------------------------------------------------------------------------

DECAY = 0.1
DECAYED = optim.sgd(0.05, momentum=0.9, weight_decay=DECAY)


def test_fednar_that_never_clips_is_fedavg_with_weight_decay() -> None:
    agree(result("fednar", DECAYED, max_norm=1e9), result("fedavg", DECAYED), 0)


def test_fednar_without_weight_decay_is_clipping() -> None:
    clipped = result("fedavg", optim.sgd(0.05, momentum=0.9, clip=0.5))
    agree(result("fednar", max_norm=0.5), clipped, 0)
    assert distance(clipped, result("fedavg")) > 1e-3


def test_fednar_clips_the_decay_with_the_gradient() -> None:
    """The first step's direction has norm A; where decay comes after clipping, or nothing is clipped, it is longer."""

    def direction(name: str, **options: Any) -> float:
        opt = optim.sgd(1.0, weight_decay=10.0, **options.pop("optimiser", {}))
        found = parameters(result(name, opt, batching=ONE_STEP, rounds=1, **options, **ALONE))
        start = parameters(resnet().state_dict())
        return float(torch.cat([(start[k] - found[k]).flatten() for k in found]).norm())

    assert direction("fednar", max_norm=0.5) == pytest.approx(0.5, abs=1e-5)
    assert direction("fedavg", optimiser={"clip": 0.5}) > 10
    assert direction("fednar", max_norm=1e9) > 10


def test_fednars_decay_is_scaled_as_its_gradient() -> None:
    """g = 3, λ = 0.5 and w = 2 give u = 4; with A = 1 the step is g/4 + (λ/4) w = 1, but for 1e-6 in the norm."""
    (found,) = weights(scalar("fednar", optim.sgd(1.0, weight_decay=0.5), (3.0,), start=2.0, max_norm=1.0))
    assert found == pytest.approx(2 - 4 / (4 + 1e-6), abs=1e-12)


@cache
def fednar() -> dict[str, Tensor]:
    return result("fednar", DECAYED, max_norm=0.5)


@pytest.mark.parametrize("cut", range(NUM_UNITS + 1))
def test_clipped_decay_with_the_joint_norm_is_fednar_at_every_cut(cut: int) -> None:
    options = {"momentum": 0.9, "weight_decay": DECAY, "clip": 0.5, "clip_decay": True}
    agree(result("sfl_v1", optim.sgd(0.05, clip_scope="joint", **options), cut), fednar())
    if 0 < cut < NUM_UNITS:
        assert distance(result("sfl_v1", optim.sgd(0.05, **options), cut), fednar()) > 1e-4


# -- FedAvgM -----------------------------------------------------------------------------------------------------------


def test_fedavgm_without_momentum_is_fedavg() -> None:
    agree(result("fedavgm", beta=0.0), result("fedavg"))
    assert distance(result("fedavgm", beta=0.5), result("fedavg")) > 1e-3


def test_fedavgm_by_hand() -> None:
    """Δ = 1 in every round: v = 1, 1.5, 1.75, ... up to 1/(1 − β) = 2."""
    found = weights(scalar("fedavgm", optim.sgd(1.0), start=10.0, rounds=60, beta=0.5))
    assert found[:3] == [9.0, 7.5, 5.75]
    assert found[-2] - found[-1] == pytest.approx(2.0, abs=1e-12)


# -- SlowMo ------------------------------------------------------------------------------------------------------------


def test_slowmo_without_momentum_is_fedavg() -> None:
    agree(result("slowmo", alpha=1.0, beta=0.0, batching=FOUR_STEPS), result("fedavg", batching=FOUR_STEPS))


def test_slowmo_at_a_constant_rate_is_fedavgm() -> None:
    world = {"batching": FOUR_STEPS, "rounds": 3, "beta": 0.6}
    agree(result("slowmo", alpha=1.0, **world), result("fedavgm", **world))
    assert distance(result("slowmo", alpha=0.9, **world), result("fedavgm", **world)) > 1e-3


def test_slowmo_at_a_falling_rate_rescales_its_momentum() -> None:
    """v ← β (η/η before) v + Δ: with a gradient of 1, Δ is η itself."""
    rates, beta = exponential(0.5, decay=0.8), 0.6
    found = weights(scalar("slowmo", optim.sgd(rates), rounds=5, alpha=1.0, beta=beta))
    w = v = 0.0
    for number, value in enumerate(found):
        v = beta * (rates(number) / rates(number - 1)) * v + rates(number)
        w -= v
        assert value == pytest.approx(w, abs=1e-12)
    fedavgm = weights(scalar("fedavgm", optim.sgd(rates), rounds=5, beta=beta))
    assert abs(fedavgm[-1] - found[-1]) > 0.1


def test_half_a_slowmo_step_goes_half_way() -> None:
    """Of the values; running statistics are the mean's."""
    world = {"batching": FOUR_STEPS, "rounds": 1}
    half, full, start = result("slowmo", alpha=0.5, beta=0.0, **world), result("fedavg", **world), resnet().state_dict()
    agree(parameters(half), {k: (start[k] + v) / 2 for k, v in parameters(full).items()})
    statistics = full.keys() - parameters(full).keys()
    assert statistics
    agree({k: half[k] for k in statistics}, {k: full[k] for k in statistics}, 0)


@pytest.mark.parametrize("cut", (0, 2, NUM_UNITS))
def test_slowmo_on_both_sides_of_a_cut_is_slowmo(cut: int) -> None:
    opt = optim.sgd(exponential(0.05, decay=0.5), momentum=0.9)
    split = SplitFed(model=Split(resnet(), cut), client_opt=opt, server_opt=opt, outer=SlowMo(0.7, 0.6))
    agree(trained(split, rounds=3), result("slowmo", opt, alpha=0.7, beta=0.6, rounds=3))


def test_slowmo_with_averaged_buffers_is_fednag_with_slow_momentum() -> None:
    world = {"batching": FOUR_STEPS, "rounds": 3}
    agree(result("slowmo", alpha=1.0, beta=0.0, buffers="average", **world), result("fednag", **world))
    kept = FedAvg(model=Split(resnet(), 1), opt=MOMENTUM, outer=SlowMo(1.0, 0.6), carry=AverageMoments())
    averaged = result("slowmo", buffers="average", **world)
    agree(averaged, trained(kept, **world), 0)
    assert distance(averaged, result("slowmo", **world)) > 1e-3


def test_slowmo_stands_still_where_the_rate_has_fallen_to_zero() -> None:
    found = weights(scalar("slowmo", optim.sgd(cosine(1.0, rounds=2)), rounds=4))
    assert found == pytest.approx([found[0], found[1], found[1], found[1]], abs=1e-12)


# -- FedNAG ------------------------------------------------------------------------------------------------------------


def test_averaging_no_moments_is_fedavg() -> None:
    without = FedAvg(model=Split(resnet(), 1), opt=PLAIN, carry=AverageMoments())
    agree(trained(without), result("fedavg", PLAIN), 0)


TORCH: dict[str, tuple[optim.Transform, Any]] = {
    "nesterov": (NESTEROV, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True)),
    "momentum": (MOMENTUM, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9)),
    "adamw": (optim.adamw(1e-3, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", TORCH)
def test_with_one_client_fednag_never_interrupts_its_optimiser(name: str) -> None:
    ours, theirs = TORCH[name]
    net, data = resnet().train(), ALONE["data"]
    opt = theirs(net.parameters())
    for number in range(3):
        for step in range(5):
            batch = data.take(walk(ALONE["partition"], number=number).samples(0, step))
            opt.zero_grad()
            F.cross_entropy(net(batch.x), batch.y).backward()
            opt.step()
    agree(result("fednag", ours, rounds=3, **ALONE), net.state_dict())
    assert distance(result("fedavg", ours, rounds=3, **ALONE), net.state_dict()) > 1e-4


def test_identical_clients_of_fednag_train_as_one() -> None:
    epochs = Batching(size=4, epochs=3)
    many, one = Partition((np.arange(4),) * 3), Partition((np.arange(4),))
    agree(*(result("fednag", NESTEROV, partition=who, batching=epochs) for who in (many, one)))


@pytest.mark.parametrize(("agg", "momenta"), [("samples", (2.5, 3.75)), ("uniform", (2.0, 3.0))])
def test_fednags_momenta_by_hand(agg: str, momenta: tuple[float, float]) -> None:
    """g = (1, 3), of 2 and 6 samples, and γ = 1/2: m = Σ p_j g_j, then 1.5 times as much, and w moves by γ m + g."""
    opt = optim.sgd(1.0, momentum=0.5, nesterov=True)
    states = scalar("fednag", opt, (1.0, 3.0), rounds=2, agg=agg)
    carried = [state.memory.carry for state in states]
    assert [float(c.moments.tree["momentum"]["1.weight"]) for c in carried] == list(momenta)
    assert [c.steps for c in carried] == [1, 2]
    g = momenta[0]
    assert weights(states) == [-1.5 * g, -1.5 * g - (g + 0.5 * momenta[1])]


@pytest.mark.parametrize(("opt", "moments"), [(NESTEROV, 1), (optim.adam(1e-3), 2)], ids=("nesterov", "adam"))
def test_fednag_costs_its_moments_like_the_model(opt: optim.Transform, moments: int) -> None:
    """8 d + 24 up and 8 d + 16 down with one moment, d more fours for each other one, in one round trip."""
    sim = simulation(
        methods.build("fednag", Split(resnet(dtype=torch.float32), 1), opt, opt), images(dtype=torch.float32)
    )
    run(sim, 2)
    values = 4 * (1 + moments) * sum(p.numel() for p in resnet().parameters())
    a_round = {"down_model": values, "up_model": values, "down_settings": 16, "up_statistics": 24}
    for j in range(len(SIZES)):
        assert sim.ledger.per_client[j] == Counter({name: 2 * size for name, size in a_round.items()})
        assert sim.ledger.trips[j] == 2


# -- Rounds of as many steps for everyone ------------------------------------------------------------------------------


class Steps(Meter):
    def __init__(self) -> None:
        self.taken: list[Mapping[int, int]] = []

    def stepped(self, sizes: Mapping[int, int]) -> None:
        self.taken.append(dict(sizes))


@pytest.mark.parametrize("name", ("slowmo", "fednag"))
def test_with_fixed_steps_every_client_takes_as_many(name: str) -> None:
    meter = Steps()
    method = methods.build(name, Split(resnet(), 1), MOMENTUM, MOMENTUM)
    run(simulation(method, batching=FOUR_STEPS, meters=(meter,)), 2)
    assert meter.taken == 2 * 4 * [{0: 4, 1: 4, 2: 4, 3: 4, 4: 3}]


def test_with_fixed_steps_the_data_start_over() -> None:
    eight = {"partition": clients_of((8,)), "data": images(8)}
    found = result("fednag", batching=FOUR_STEPS, **eight)
    agree(found, result("fednag", batching=Batching(size=4, epochs=2), **eight), 0)


# -- What each client's model counts -----------------------------------------------------------------------------------

PLAIN_MEAN = [
    *((name, {}, 1) for name in ("fedavg", "fedprox", "fednar", "fedavgm", "slowmo", "fednag")),
    *(("sfl_v1", {"sync": sync}, cut) for sync in ("round", "epoch", "step") for cut in (1, 2)),
    *(("smofi", options, cut) for options in ({}, {"align": False}) for cut in (1, 2)),
    ("sfl_v2", {}, 2),  # only the client's layers are averaged
]


@pytest.mark.parametrize(("name", "options", "cut"), PLAIN_MEAN)
def test_models_weigh_as_their_samples_or_all_the_same(name: str, options: dict[str, Any], cut: int) -> None:
    """One step with g = (1, 3), of 2 and 6 samples, from 0: −(1/4 + 9/4) or −(1/2 + 3/2)."""
    opt = optim.sgd(1.0, momentum=0.5)
    for agg, expected in (("samples", -2.5), ("uniform", -2.0)):
        assert weights(scalar(name, opt, (1.0, 3.0), cut=cut, agg=agg, **options)) == [expected]


# -- All of it together ------------------------------------------------------------------------------------------------

OBJECTIVES: dict[str, dict[str, Any]] = {
    "plain": {},
    "proximal": {"proximal": 0.5},
    "clip_decay": {"weight_decay": DECAY, "clip": 0.5, "clip_scope": "joint", "clip_decay": True},
}
ROUNDS = ("fedavg", "fedavgm", "slowmo", "fednag", "smofi")
GRID = [(objective, name) for objective in OBJECTIVES for name in ROUNDS]


@cache
def tiny() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh(), nn.Linear(4, 10)).double()


@cache
def combined(objective: str, name: str, engine: str) -> dict[str, Tensor]:
    opt = optim.sgd(0.1, momentum=0.9, nesterov=True, **OBJECTIVES[objective])
    return trained(methods.build(name, Split(tiny(), 2), opt, opt), engine=engine)


@pytest.mark.parametrize(("objective", "name"), GRID)
def test_engines_agree_on_every_combination(objective: str, name: str) -> None:
    agree(combined(objective, name, "vmap"), combined(objective, name, "loop"))


def test_no_combination_is_another() -> None:
    for one, other in combinations(GRID, 2):
        assert distance(combined(*one, "loop"), combined(*other, "loop")) > 1e-4, (one, other)


def test_fedprox_and_fednar_are_fedavg_with_options_of_the_optimiser() -> None:
    opt = optim.sgd(0.1, momentum=0.9, nesterov=True)
    decayed = optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=DECAY)
    split = Split(tiny(), 2)
    agree(trained(methods.build("fedprox", split, opt, opt, mu=0.5)), combined("proximal", "fedavg", "loop"), 0)
    found = trained(methods.build("fednar", split, decayed, decayed, max_norm=0.5))
    agree(found, combined("clip_decay", "fedavg", "loop"), 0)


# -- Mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, optim.Transform, dict[str, Any], str]] = [
    ("fedprox", PLAIN, {"mu": -1.0}, "mu is -1.0, but it must be a number of at least 0."),
    ("fednar", PLAIN, {"max_norm": 0.0}, "max_norm is 0.0, but it must be a number above 0."),
    ("fedavgm", PLAIN, {"beta": 1.0}, "beta is 1.0, but it must be a number from 0 up to below 1."),
    ("slowmo", PLAIN, {"beta": -0.1}, "beta is -0.1, but it must be a number from 0 up to below 1."),
    ("slowmo", PLAIN, {"alpha": 0.0}, "alpha is 0.0, but it must be a number above 0."),
    (
        "fednag",
        PLAIN,
        {},
        "fednag averages the moments of the local optimisers, but this one keeps none; set its momentum, for example "
        "momentum = 0.9 with nesterov = true",
    ),
]


@pytest.mark.parametrize(("name", "opt", "options", "message"), MISTAKES)
def test_options_that_make_no_sense(name: str, opt: optim.Transform, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        methods.build(name, Split(tiny(), 2), opt, opt, **options)
    assert str(caught.value) == message


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError) as caught:
        result("slowmo", buffers="maintain")
    assert str(caught.value) == "unknown buffers 'maintain' in slowmo; known: average, reset."
    for name in ("fedavg", "fedprox", "fednar", "fedavgm", "slowmo", "fednag", "sfl_v1", "sfl_v2", "smofi"):
        with pytest.raises(UnknownNameError) as caught:
            result(name, agg="equal")
        assert str(caught.value) == "unknown agg 'equal'; known: samples, uniform."
