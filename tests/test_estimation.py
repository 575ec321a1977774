"""Specifies HASFL's running estimates of beta, sigma_j^2 and G_j^2: their numbers by hand, and what they cost."""

import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import agree, clients_of, run, simulation
from hasfl_by_hand import Samples, World, averaged, copies, mean, parameters
from torch import Tensor, nn

from cutlayer import methods, optim
from cutlayer.core.state import State
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError
from cutlayer.methods.hasfl import Hasfl
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.problem import Bound, Costs, Fleet, Latency, Problem
from cutlayer.planning.profile import profile
from cutlayer.runs.simulation import Simulation
from cutlayer.runs.training import Training
from cutlayer.split import Split

ENGINES = ("loop", "vmap")
LR = 0.05
HELD = (12, 40, 9)  # samples of each client; the first estimates take at most 32
BATCHES = (4, 5, 2)  # of an odd one, all but one sample tell
WIDTHS = (6, 2, 1)
NUM_UNITS = 3
INTERVAL = 3
KEPT_BETA, KEPT = 0.5, 0.9


def squares(out: Tensor, y: Tensor) -> Tensor:
    """Least squares."""
    return (out[:, 0] - y).square().mean() / 2


def layers() -> nn.Module:
    """A deep linear model."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        pairs = zip((4, *WIDTHS), WIDTHS, strict=False)
        return nn.Sequential(*(nn.Linear(a, b) for a, b in pairs)).double()


def points() -> Arrays:
    random = torch.Generator().manual_seed(5)
    x, y = (torch.randn(sum(HELD), *shape, generator=random, dtype=torch.float64) for shape in ((4,), ()))
    return Arrays(x=x, y=y)


WORLD = World(points(), clients_of(HELD), LR, squares)
DEVICES = Devices(
    clients=(Device(1e5, 1e3, 9e4), Device(2e3, 1e6, 4e6), Device(2e4, 5e3, 1e4)),
    server=4e5,
    lanes="shared",
    server_up=6e4,
    server_down=8e4,
    model_sync=True,
)


def costs(net: nn.Module | None = None) -> Costs:
    return Costs.of(profile(net or layers(), torch.zeros(2, 4, dtype=torch.float64)))


def hasfl(cuts: Any = "planned", batches: Any = BATCHES, net: nn.Module | None = None, **options: Any) -> Hasfl:
    opt = optim.sgd(LR)
    given = {"devices": DEVICES, "costs": costs(), "interval": INTERVAL, "batches": batches, "cuts": cuts, **options}
    return methods.hasfl(model=Split(net or layers(), 1, loss=squares), client_opt=opt, server_opt=opt, **given)


def sim_of(method: Hasfl, world: World = WORLD, **options: Any) -> Simulation:
    return simulation(method, world.data, world.partition, **options)


def rounds_of(method: Hasfl, num: int, world: World = WORLD, **options: Any) -> list[State]:
    sim = sim_of(method, world, **options)
    states = [sim.start()]
    for _ in range(num):
        states.append(sim.round(states[-1]))
    return states[1:]


def deepest(state: State) -> int:
    return max(state.memory.plan.cuts.values())


class Estimated(NamedTuple):
    """The estimates of one client, or their means over the clients."""

    beta: Tensor
    noise: Tensor
    slope: Tensor
    gap: Tensor

    def renewed(self, new: "Estimated") -> "Estimated":
        return Estimated(
            KEPT_BETA * self.beta + (1 - KEPT_BETA) * new.beta,
            KEPT * self.noise + (1 - KEPT) * new.noise,
            KEPT * self.slope + (1 - KEPT) * new.slope,
            new.gap,
        )


def by_unit(change: dict[str, Tensor]) -> Tensor:
    """Squared norm of each layer's share."""
    return torch.stack([sum(v.square().sum() for n, v in change.items() if n[0] == str(k)) for k in range(NUM_UNITS)])


def less(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - b[name] for name, value in a.items()}


class End(NamedTuple):
    """What a client sees at one end of a round, on the two halves of its batch."""

    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]
    noise: Tensor
    loss: Tensor

    @classmethod
    def of(cls, net: nn.Module, samples: np.ndarray, world: World) -> "End":
        half = len(samples) // 2
        first, second = (world.told(net, samples[k : k + half]) for k in (0, half))
        gradient = {name: (g + second.gradient[name]) / 2 for name, g in first.gradient.items()}
        noise = 2 * half / 4 * by_unit(less(first.gradient, second.gradient))
        return cls(parameters(net), gradient, noise, (first.loss + second.loss) / 2)


def of_client(begin: End, end: End) -> Estimated:
    change, distance = less(end.gradient, begin.gradient), less(end.weights, begin.weights)
    return Estimated(
        (by_unit(change).sum() / by_unit(distance).sum()).sqrt(),
        (begin.noise + end.noise) / 2,
        (by_unit(begin.gradient) + by_unit(end.gradient)) / 2,
        begin.loss,
    )


def of_round(
    before: nn.Module, nets: list[nn.Module], samples: Samples, who: tuple[int, ...], world: World = WORLD
) -> Estimated:
    """Clients weigh the same, but for beta, where they weigh as their samples."""
    found = [of_client(End.of(before, samples[j], world), End.of(nets[j], samples[j], world)) for j in who]
    sizes = torch.tensor([len(world.partition.clients[j]) for j in who], dtype=torch.float64)
    beta = (sizes * torch.stack([one.beta for one in found])).sum() / sizes.sum()
    return Estimated(*(mean(some) for some in zip(*found, strict=True)))._replace(beta=beta)


def probed(world: World = WORLD, net: nn.Module | None = None) -> Estimated:
    """One step of everyone with 32 samples, at the model's own cut, which nobody keeps."""
    net, sizes = net or layers(), [min(32, len(index)) for index in world.partition.clients]
    (samples,) = world.batches(0, 1, sizes)
    nets = copies(net, net.state_dict(), len(sizes))
    world.train(nets, iter([samples]), deepest=1)
    return of_round(net, nets, samples, tuple(world.everyone), world)


def trained(
    net: nn.Module, number: int, cut: int, sizes: tuple[int, ...], who: tuple[int, ...]
) -> tuple[nn.Module, Estimated]:
    """The model after a round, and what the round told."""
    nets = copies(net, net.state_dict(), len(sizes))
    WORLD.train(nets, WORLD.batches(number, INTERVAL, sizes), cut)
    found = of_round(net, nets, next(WORLD.batches(number, 1, sizes)), who)
    after = copy.deepcopy(net)
    after.load_state_dict(averaged(nets))
    return after, found


def assert_told(method: Hasfl, state: State, expected: Estimated) -> None:
    told = method.metrics(state)["bound"]
    assert told["lr"] == LR
    for name, value in expected._asdict().items():
        agree(torch.tensor(told[name], dtype=torch.float64), value, 1e-9)


# -- the numbers -------------------------------------------------------------------------------------------------------


FAR = 1e6  # a target that every plan reaches, so that the fastest cuts are planned
PLANS: dict[str, dict[str, Any]] = {
    "all at the first cut": {},
    "all layers at a device": {"target": FAR},
    "common layers, own ones and some between": {"cuts": (2, 1, 1), "batches": "planned"},
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("plan", "expected"), list(zip(PLANS, (1, 3, 2), strict=True)))
def test_the_estimates_are_those_of_the_same_batches_by_hand(plan: str, expected: int, engine: str) -> None:
    """From the first ones, half of a new beta and a tenth of new noise and slopes enter; the gap is replaced."""
    method, net, known = hasfl(**PLANS[plan]), layers(), probed()
    for number, state in enumerate(rounds_of(method, 3, engine=engine)):
        sizes = tuple(state.memory.plan.batches.values())
        assert deepest(state) == expected and min(sizes) > 1
        net, new = trained(net, number, expected, sizes, (0, 1, 2))
        known = known.renewed(new)
        assert_told(method, state, known)
        agree(dict(methods.global_model(state).params), parameters(net))


def test_single_samples_leave_the_first_estimates_as_they_are() -> None:
    method = hasfl(batches=(1, 1, 1))
    for state in rounds_of(method, 2):
        assert_told(method, state, probed())


def test_a_client_with_a_single_sample_trains_but_does_not_tell() -> None:
    sizes = (4, 1, 3)
    method = hasfl(batches=sizes)
    (state,) = rounds_of(method, 1)
    _, new = trained(layers(), 0, deepest(state), sizes, (0, 2))
    assert_told(method, state, probed().renewed(new))


def test_one_client_that_could_tell_would_tell_of_itself_so_nobody_does() -> None:
    method = hasfl(batches=(4, 1, 1))
    (state,) = rounds_of(method, 1)
    assert_told(method, state, probed())


def test_estimates_are_renewed_only_before_a_new_plan() -> None:
    method = hasfl(replan_every=3)
    states = rounds_of(method, 3)
    for state in states[:2]:
        assert_told(method, state, probed())
    net, cut = layers(), deepest(states[0])
    for number in range(3):
        net, new = trained(net, number, cut, BATCHES, (0, 1, 2))
    assert_told(method, states[2], probed().renewed(new))


@pytest.mark.parametrize("engine", ENGINES)
def test_beta_of_a_parabola_is_its_curvature(engine: str) -> None:
    """Client j's loss is a_j^2 (w - c)^2 / 2 in one weight: beta is the mean of a_j^2 by samples, from any batch."""

    class Line(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Flatten(), nn.Linear(1, 1, bias=False))

    scale, held = (2.0, 0.5, 1.0), (12, 20, 8)
    random, net = torch.Generator().manual_seed(0), Line().double()
    signs = torch.randint(0, 2, (sum(held), 1), generator=random) * 2.0 - 1
    x = signs.double() * torch.tensor(np.repeat(scale, held))[:, None]
    world = World(Arrays(x=x, y=torch.randn(sum(held), generator=random).double()), clients_of(held), LR, squares)
    table = Costs.of(profile(net, torch.zeros(2, 1, dtype=torch.float64)))
    method = hasfl((1, 1, 1), "planned", net, costs=table)
    curvature = sum(n * a * a for n, a in zip(held, scale, strict=True)) / sum(held)
    for state in rounds_of(method, 2, world, engine=engine):
        told = method.metrics(state)["bound"]
        assert told["beta"] == pytest.approx(curvature, rel=1e-9)
        assert told["noise"][0] == told["slope"][0] == 0  # a layer without parameters
        assert told["noise"][1] > 0 and told["slope"][1] > 0


def test_noise_of_equal_samples_is_none() -> None:
    """Where all samples of a client are alike, its halves agree."""
    x = torch.ones(sum(HELD), 4, dtype=torch.float64)
    world = WORLD._replace(data=Arrays(x=x, y=x[:, 0]))
    method = hasfl()
    (state,) = rounds_of(method, 1, world)
    told = method.metrics(state)["bound"]
    assert told["noise"] == [0.0] * NUM_UNITS
    assert min(told["slope"]) > 0
    assert_told(method, state, probed(world).renewed(first_round(world, deepest(state))))


def first_round(world: World, cut: int) -> Estimated:
    nets = copies(layers(), layers().state_dict(), 3)
    world.train(nets, world.batches(0, INTERVAL, BATCHES), cut)
    return of_round(layers(), nets, next(world.batches(0, 1, BATCHES)), (0, 1, 2), world)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_plan_is_made_of_what_is_known_when_its_round_begins(engine: str) -> None:
    method = hasfl(batches="planned")
    states = rounds_of(method, 3, engine=engine)
    known = probed()
    for state in states:
        noise, slope = known.noise.numpy(), known.slope.numpy()
        bound = Bound(beta=float(known.beta), lr=LR, noise=noise, slope=slope, gap=float(known.gap))
        plan = method.policy(
            (0, 1, 2), batch=4, cut=1, samples=dict(enumerate(HELD)), key=0, bound=bound, previous=None
        )
        assert state.memory.plan.cuts == plan.cuts
        assert state.memory.plan.batches == plan.batches
        told = method.metrics(state)["bound"]
        known = Estimated(*(torch.tensor(told[name], dtype=torch.float64) for name in Estimated._fields))


def spoilt(*clients: int) -> Arrays:
    """Data of which these clients' samples are not finite."""
    x = WORLD.data.x.clone()
    for j in clients:
        x[torch.from_numpy(WORLD.partition.clients[j])] = torch.nan
    return Arrays(x=x, y=WORLD.data.y)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_is_not_finite_is_left_out_of_the_estimates(engine: str) -> None:
    """The estimates are those of the other two clients, as if this one held no samples."""
    method = hasfl(target=FAR)
    sick = sim_of(method, engine=engine)
    sick.job.data = spoilt(1)
    first, _, third = WORLD.partition.clients
    absent = WORLD._replace(partition=Partition((first, first[:0], third)))
    found, expected = (method.metrics(s.round(s.start())) for s in (sick, sim_of(method, absent, engine=engine)))
    assert found["plan"]["cuts"][0] == expected["plan"]["cuts"][0]
    for name, value in expected["bound"].items():
        assert found["bound"][name] == pytest.approx(value, rel=1e-9)


def test_without_a_finite_client_the_estimates_stay_or_planning_fails() -> None:
    method = hasfl()
    sim = sim_of(method)
    first = sim.round(sim.start())
    sim.job.data = spoilt(0, 1, 2)
    second = sim.round(first)
    assert method.metrics(second)["bound"] == method.metrics(first)["bound"]
    with pytest.raises(ConfigError, match=r"^no client's gradients are finite, so there is nothing to plan by"):
        sim.round(sim.start())


# -- what they cost ----------------------------------------------------------------------------------------------------

VALUE = 8  # bytes
SHARES = VALUE * (2 * NUM_UNITS + 2)  # noise and slope of each layer, and the two distances
CROSSING = (None, *WIDTHS)  # values of a sample at each cut
MODEL = (0, 30, 44, 47)  # parameters up to each cut: 4*6 + 6, 6*2 + 2 and 2 + 1
ROUNDS = 2


@pytest.mark.parametrize("engine", ENGINES)
def test_the_bytes_of_the_estimates_are_counted(engine: str) -> None:
    """The first estimates: layers down, one step, and both halves of its batch twice. Each round: both halves twice."""
    sim = sim_of(hasfl(target=FAR), engine=engine)
    states = [sim.round(sim.start())]
    states.append(sim.round(states[0]))
    cuts = [[state.memory.plan.cuts[j] for j in range(3)] for state in states]
    first = [min(32, n) for n in HELD]
    for j, batch in enumerate(BATCHES):
        tried, even = first[j], first[j] // 2 * 2
        samples = {1: tried + 2 * even}  # by cut
        for plan in cuts:
            samples[plan[j]] = samples.get(plan[j], 0) + INTERVAL * batch + 2 * (batch // 2 * 2)
        crossed = VALUE * sum(CROSSING[cut] * num for cut, num in samples.items())
        models = VALUE * sum(MODEL[plan[j]] for plan in cuts)
        assert sim.ledger.per_client[j] == {
            "up_activations": crossed,
            "down_gradients": crossed,
            "up_labels": VALUE * sum(samples.values()),
            "up_model": models,
            "down_model": models + VALUE * MODEL[1],
            "down_settings": (ROUNDS + 1) * 2 * 8,
            "up_statistics": (ROUNDS + 1) * SHARES,
        }
    totals = sim.ledger.totals
    assert totals["inter_server_statistics"] == (ROUNDS + 1) * 3 * (SHARES + VALUE)  # and each client's loss
    between = VALUE * sum(MODEL[max(plan)] - MODEL[cut] for plan in cuts for cut in plan)
    moved = VALUE * sum(abs(MODEL[max(b)] - MODEL[max(a)]) for a, b in zip([[1], *cuts], cuts, strict=False))
    told = VALUE * (2 * NUM_UNITS + 2)  # the means of beta, the gap, and of each layer's noise and slope
    assert totals["inter_server_model"] == between > 0
    assert totals["inter_server_sync"] == between + moved + (ROUNDS + 1) * told
    assert sim.ledger.samples == sum(3 * n for n in first) + ROUNDS * sum((INTERVAL + 2) * b for b in BATCHES)


EQUAL = Devices(
    clients=(Device(2e3, 3e4, 9e4, 2e4, 5e4),) * 3,
    server=4e5,
    lanes="shared",
    server_up=6e4,
    server_down=8e6,
    model_sync=True,
)


def seconds(batch: int, cut: int) -> Latency:
    """The seconds of a step of all clients with this batch and cut, at 64 bits per value."""
    table = costs()
    twice = {name: 2 * getattr(table, name) for name in ("up", "down", "model")}
    none = np.zeros(NUM_UNITS)
    bound = Bound(beta=1.0, lr=1.0, noise=none, slope=none, gap=1.0)
    problem = Problem(costs=replace(table, **twice), fleet=Fleet.of(EQUAL), bound=bound)
    return problem.latency((batch,) * 3, (cut,) * 3)


@pytest.mark.parametrize("engine", ENGINES)
def test_looking_takes_the_time_of_two_more_steps(engine: str) -> None:
    """On equal devices with equal batches; before the first round also the model's way down and three steps."""
    world = WORLD._replace(partition=clients_of((20, 20, 20)))
    sim = sim_of(hasfl((2, 2, 2), "planned", devices=EQUAL), world, engine=engine, devices=EQUAL)
    state, end = sim.start(), 0.0
    for number in range(3):
        state = sim.round(state)
        (batch,) = set(state.memory.plan.batches.values())
        a_round, halves = seconds(batch, 2), seconds(batch // 2 * 2, 2)
        trains = INTERVAL * a_round.split + 2 * halves.split
        assert batch > 1
        if number == 0:
            first = seconds(20, 1)
            least = first.model_down.max() + 3 * first.split + trains + a_round.model_up.max()
            assert least * (1 - 1e-9) <= sim.clock.now <= least + a_round.aggregation
        else:
            assert sim.clock.now - end == pytest.approx(trains + a_round.aggregation, rel=1e-9)
            assert sim.clock.spent[:2] == tuple(pytest.approx(s, rel=1e-9) for s in (trains, a_round.aggregation))
        end = sim.clock.now


def test_a_plan_that_needs_no_estimates_looks_at_nothing() -> None:
    sim = sim_of(hasfl("random", "random"))
    state = run(sim, 2)
    assert "up_statistics" not in sim.ledger.totals and state.memory.estimates is None
    told = Training(runner=sim_of(hasfl((1, 2, 1)))).round()
    assert "bound" not in told and "plan" in told


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_a_planned_cut_is_one_cut_not_two() -> None:
    net, opt = layers(), optim.sgd(LR)
    with pytest.raises(ConfigError) as caught:
        methods.hasfl(
            model=Split(net, 1, head=2), client_opt=opt, server_opt=opt, devices=DEVICES, costs=costs(), interval=2
        )
    assert str(caught.value) == ("hasfl plans one cut for each device, not a U-shape; give it fixed batches and cuts")


def test_estimates_need_two_clients() -> None:
    world = WORLD._replace(partition=clients_of((12,)))
    with pytest.raises(ConfigError) as caught:
        rounds_of(hasfl((1,), "planned"), 1, world)
    assert str(caught.value) == ("this method needs at least 2 clients a round, but per_round is 1")
