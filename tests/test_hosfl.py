"""Specifies HO-SFL: its estimator, what it becomes in the limit, what crosses, and what it refuses."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import agree, clients_of, images, resnet, run, simulation, trained, walk
from hybrid_worlds import (
    ENGINES,
    EQUAL,
    NUM_LOWER,
    PLAIN,
    WIDTH,
    P,
    flat,
    hosfl,
    kept,
    moved,
    same,
    seeds_of,
    smooth,
    states,
    take_turns,
    world,
)
from torch import Tensor, nn
from torch.func import vmap

from cutlayer import methods, models, optim
from cutlayer.core import directions
from cutlayer.core.batches import Batching
from cutlayer.core.kinds import ACTIVATIONS, GRADIENTS, LABELS, MODEL, SCALARS, SETTINGS, SETUP, SLOPES, Kind, Place
from cutlayer.core.meter import Direction
from cutlayer.core.method import method
from cutlayer.core.places import Clients
from cutlayer.core.servers import Fed, Server
from cutlayer.core.state import Part, State
from cutlayer.core.values import PerClient
from cutlayer.errors import ConfigError, LawError, UnknownNameError
from cutlayer.methods.hosfl import HybridOrder
from cutlayer.pieces.finite_mean import all_finite
from cutlayer.pieces.hybrid import HybridClient
from cutlayer.runs.stopping import Limits
from cutlayer.runs.train import train
from cutlayer.runs.training import Training
from cutlayer.split import Split

UNIT = optim.sgd(1.0)  # a step is the gradient itself


def gradients(net: nn.Module, sizes: tuple[int, ...], weights: list[float]) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: the weighted mean of the clients' first batches' gradients, of both halves."""
    data, batches = images(sum(sizes)), walk(clients_of(sizes))
    total = torch.zeros((), dtype=torch.float64)
    for j, weight in enumerate(weights):
        batch = data.take(batches.samples(j, 0))
        total = total + weight / sum(weights) * F.cross_entropy(net(batch.x), batch.y)
    lower, upper = ([*half.parameters()] for half in net.children())  # type: ignore[misc]
    found = torch.autograd.grad(total, [*lower, *upper])
    return tuple(torch.cat([g.flatten() for g in half]) for half in (found[: len(lower)], found[len(lower) :]))  # type: ignore[return-value]


def linear() -> nn.Sequential:
    """A client whose output is linear in its parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        lower = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        return nn.Sequential(lower, nn.Sequential(nn.Tanh(), nn.Linear(3, 10))).double()


def directions_of(number: int, num: int = P, length: int = NUM_LOWER) -> Tensor:
    return directions.normals(seeds_of(number, num)[:, None], 0, length)


# -- the estimator -----------------------------------------------------------------------------------------------------

WEIGHTS = {"uniform": [1.0, 1.0, 1.0], "samples": [8.0, 12.0, 5.0]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("agg", WEIGHTS)
@pytest.mark.parametrize("smoothing", (100.0, 1.0, 1e-3))
def test_a_linear_client_projects_its_gradient_whatever_the_smoothing(smoothing: float, agg: str, engine: str) -> None:
    """ĝ_c = (1/P) Σ u uᵀ g, and the server's half takes the gradient itself; both are means over the clients."""
    sizes = (8, 12, 5)
    lower, upper = moved(world(hosfl(linear(), UNIT, smoothing=smoothing, agg=agg), sizes, engine=engine))
    below, above = gradients(linear(), sizes, WEIGHTS[agg])
    u = directions_of(0)
    agree(upper, above)
    agree(lower, u.T @ (u @ below) / P)


def test_weights_by_samples_are_not_uniform_ones() -> None:
    sizes = (8, 12, 5)
    one, other = (moved(world(hosfl(linear(), UNIT, agg=agg), sizes))[0] for agg in WEIGHTS)
    assert float((one - other).norm() / one.norm()) > 0.01


@pytest.mark.parametrize("engine", ENGINES)
def test_slopes_that_overflow_leave_the_servers_half_alone(engine: str) -> None:
    """A client whose moved parameters give no finite activations is missing from the clients' mean only."""
    data = images(24)
    x = data.x.clone()
    x[8:16] *= 1e306  # the hyperbolic tangent at the server makes ones of it
    sim = world(hosfl(linear(), UNIT, smoothing=1e3), (8, 8, 8), data=replace(data, x=x), engine=engine)
    start, end = states(sim, 1)
    assert float(end.report.tree.stopped) == 0.0 and bool(end.memory.log.tree.slopes.isfinite().all())
    below = gradients(linear(), (8, 8, 8), [1.0, 0.0, 1.0])[0]
    u = directions_of(0)
    agree(flat(start.client.tree.params) - flat(end.client.tree.params), u.T @ (u @ below) / P)
    assert not torch.equal(flat(start.server.tree.params), flat(end.server.tree.params))


@dataclass(frozen=True)
class Alone:
    """One client by itself: its part, a batch, and a gradient at the cut that is given."""

    client: HybridClient
    part: Part
    x: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, net: nn.Module, x: Tensor, gradient: Tensor, smoothing: float) -> "Alone":
        method = hosfl(net, UNIT, smoothing=smoothing)
        return cls(method.client, UNIT.begin(method.model.initial()[0], 0), x, gradient)

    def estimates(self, seeds: Tensor) -> Tensor:
        """ĝ_c of each row of seeds."""

        def one(row: Tensor) -> Tensor:
            z = self.client.forward(self.part, self.x, None)
            v = self.client.slopes(self.part, self.x, None, row, z, self.gradient)
            return flat(self.part.params) - flat(self.client.update(self.part, row, v).params)

        return vmap(one)(seeds)

    def true(self) -> Tensor:
        """The gradient by back-propagation."""
        values = {k: v.clone().requires_grad_() for k, v in self.part.params.items()}
        z = self.client.forward(self.part._replace(params=values), self.x, None)
        return torch.cat([g.flatten() for g in torch.autograd.grad((z * self.gradient).sum(), list(values.values()))])


def alone(net: nn.Sequential, smoothing: float = 1e-3) -> Alone:
    random = torch.Generator().manual_seed(5)
    gradient = torch.randn(4, WIDTH, generator=random, dtype=torch.float64)
    return Alone.of(net, images(4).x, gradient, smoothing)


@pytest.mark.parametrize("num", (1, 4))
def test_a_linear_client_is_unbiased_with_the_variance_of_gaussian_projections(num: int) -> None:
    """E ĝ = g and E |ĝ|² = (1 + (d + 1) / P) |g|², within three standard errors."""
    one = alone(linear(), smoothing=1.0)
    g, trials = one.true(), 8_000
    found = one.estimates(directions.seeds(num, trials * num).reshape(trials, num))
    assert len(g) == NUM_LOWER
    along = found @ g / (g @ g)
    assert abs(float(along.mean()) - 1) < 3 * float(along.std()) / math.sqrt(trials)
    worst = ((found.mean(0) - g).abs() / (found.std(0) / math.sqrt(trials))).max()
    assert float(worst) < 4  # of 195 coordinates
    square = found.square().sum(1) / g.square().sum()
    assert abs(float(square.mean()) - (1 + (NUM_LOWER + 1) / num)) < 3 * float(square.std()) / math.sqrt(trials)


@pytest.mark.parametrize("engine", ENGINES)
def test_many_directions_are_a_step_of_synchronous_sfl(engine: str) -> None:
    """The server's half exactly; the client's to an error that falls like 1 / sqrt(P), as the variance says."""
    world_of = {"batching": Batching(size=4, steps=1), "rounds": 1}
    sfl = methods.sfl_v1(model=Split(smooth(), 1), client_opt=UNIT, server_opt=UNIT)
    target = trained(sfl, images(sum(EQUAL)), clients_of(EQUAL), **world_of)
    below, above = gradients(smooth(), EQUAL, [1.0] * 5)
    start = smooth().state_dict()
    agree(flat({k: start[k] - target[k] for k in start if k.startswith("1.")}), above)
    agree(flat({k: start[k] - target[k] for k in start if k.startswith("0.")}), below)
    for num in (16, 128, 1024) if engine == "vmap" else (16, 128):
        lower, upper = moved(world(hosfl(opt=UNIT, perturbations=num, smoothing=1e-5), engine=engine))
        agree(upper, above)
        error = float((lower - below).norm() / below.norm())
        deviation = 1 / math.sqrt(2 * num)  # relative, of a norm whose square adds up P squares of normal numbers
        assert error == pytest.approx(math.sqrt((NUM_LOWER + 1) / num), rel=3 * deviation)


def test_the_server_is_told_nothing_of_smoothing_or_directions() -> None:
    few, many = (moved(world(hosfl(opt=UNIT, perturbations=k, smoothing=s)))[1] for k, s in ((1, 1e-1), (7, 1e-4)))
    assert torch.equal(few, many)


# -- bias: expectations are exact, by Gauss and Hermite's quadrature ---------------------------------------------------


class Power(nn.Module):
    """x times a power of the parameters, number by number."""

    def __init__(self, exponent: int, theta: tuple[float, ...]) -> None:
        super().__init__()
        self.exponent, self.theta = exponent, nn.Parameter(torch.tensor(theta, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.theta**self.exponent


class Wave(nn.Module):
    """Sines of the one parameter: no polynomial."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([0.4], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.theta)


def expected(module: nn.Module, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float]:
    """E ĝ_c and the gradient, of one parameter; seed k stands for node k of a rule that is exact to degree 59."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(30)
    table, weights = torch.from_numpy(nodes), torch.from_numpy(weights / weights.sum())
    monkeypatch.setattr(directions, "normals", lambda seed, start, stop: table[seed].reshape(*seed.shape[:-1], 1))
    x, gradient = (torch.tensor(v, dtype=torch.float64) for v in ([[1.5], [-0.5]], [[0.7], [0.2]]))
    one = Alone.of(nn.Sequential(module, nn.Linear(1, 1).double()), x, gradient, smoothing)
    found = torch.stack([one.estimates(torch.tensor([[k]]))[0] for k in range(30)])
    return float((weights[:, None] * found).sum()), float(one.true())


SLOPE = 1.5 * 0.7 - 0.5 * 0.2  # Σ x λ of the batch


@pytest.mark.parametrize("smoothing", (2.0, 0.1, 1e-3))
@pytest.mark.parametrize("exponent", (1, 2))
def test_up_to_quadratic_clients_have_no_bias(exponent: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    mean, true = expected(Power(exponent, (0.3,)), smoothing, monkeypatch)
    assert true == pytest.approx({1: 1.0, 2: 0.6}[exponent] * SLOPE, rel=1e-14)
    assert mean == pytest.approx(true, rel=1e-10)


@pytest.mark.parametrize("smoothing", (0.8, 0.4, 0.05))
def test_the_bias_of_a_cubic_client_is_three_mu_squared(smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """E u (θ + μu)³ / μ = 3θ² + 3μ²: halving μ quarters it."""
    mean, true = expected(Power(3, (0.3,)), smoothing, monkeypatch)
    assert true == pytest.approx(3 * 0.09 * SLOPE, rel=1e-14)
    assert mean - true == pytest.approx(3 * smoothing**2 * SLOPE, rel=1e-9)


def test_halving_mu_quarters_the_bias_of_a_smooth_client_in_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    bias = [np.subtract(*expected(Wave(), mu, monkeypatch)) for mu in (0.2, 0.1, 0.05, 0.025)]
    ratios = np.divide(bias[:-1], bias[1:])
    assert ratios == pytest.approx([4.0] * 3, rel=0.02) and abs(ratios[2] - 4) < abs(ratios[0] - 4)


def test_a_quadratic_client_of_many_parameters_by_opposite_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over u and -u is u uᵀ g, so the Hessian has no part in it."""
    theta = (0.3, -0.7, 1.1, 0.2)
    u = torch.randn(6, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table = torch.cat((u, -u))
    monkeypatch.setattr(directions, "normals", lambda seed, start, stop: table[seed].reshape(*seed.shape[:-1], 4))
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    one = Alone.of(nn.Sequential(Power(2, theta), nn.Linear(4, 1).double()), x, x.flip(0), 0.5)
    both = torch.stack([one.estimates(torch.tensor([[k]]))[0] for k in range(12)])
    agree((both[:6] + both[6:]) / 2, u * (u @ one.true())[:, None])
    assert float((both[:6] - both[6:]).abs().max()) > 0.1  # each by itself does have it


@pytest.mark.parametrize("engine", ENGINES)
def test_no_gradient_at_the_cut_leaves_the_client_where_it_is(engine: str) -> None:
    """λ = 0, with plain gradient descent."""
    split = Split(smooth(), 1, loss=lambda out, y: 0.0 * out.sum())
    method = methods.hosfl(model=split, client_opt=PLAIN, server_opt=PLAIN, perturbations=P)
    start, *_, end = states(world(method, engine=engine), 3)
    assert torch.equal(flat(start.client.tree.params), flat(end.client.tree.params))
    assert torch.equal(flat(start.server.tree.params), flat(end.server.tree.params))
    assert end.client.tree.count == 3


# -- what belongs to a client's passes ---------------------------------------------------------------------------------


def test_the_passes_of_a_step_share_their_dropout() -> None:
    """Otherwise the difference of two masks, divided by μ, would drown the slope."""
    torch.manual_seed(8)
    net = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Dropout(0.5)), nn.Linear(3, 10)).double()
    method = hosfl(net, smoothing=1e-6)
    part, x, seeds = PLAIN.begin(method.model.initial()[0], 0), images(4).x, seeds_of(0)
    z = method.client.forward(part, x, 77)
    assert 0 < int((z == 0).sum()) < z.numel()
    v = method.client.slopes(part, x, 77, seeds, z, torch.ones_like(z))
    u = directions_of(0)
    kept_units = (z != 0).double() * 2
    by_hand = [(kept_units * (x.flatten(1) @ row[:192].reshape(3, 64).T + row[192:])).sum() for row in u]
    agree(v / 1e-6, torch.stack(by_hand), 1e-6)


def frozen() -> nn.Module:
    net = resnet()
    with torch.random.fork_rng():
        torch.manual_seed(6)
        for name, buffer in net.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
    models.freeze_norms(net)
    return net


@pytest.mark.parametrize("engine", ENGINES)
def test_frozen_norms_have_no_direction_and_stay_as_they_are(engine: str) -> None:
    method = methods.hosfl(model=Split(frozen(), 2), client_opt=PLAIN, server_opt=PLAIN)
    sim = simulation(method, engine=engine)
    start, end = sim.start().client.tree, run(sim, 2).client.tree
    assert start.frozen and start.buffers and not any("bn" in name for name in start.params)
    assert torch.equal(flat(start.frozen), flat(end.frozen)) and torch.equal(flat(start.buffers), flat(end.buffers))
    assert not torch.equal(flat(start.params), flat(end.params))


@pytest.mark.parametrize("perturbations", (1, P))
def test_engines_agree(perturbations: int) -> None:
    """Also with a smaller batch, momentum, and BatchNorm at the server; slopes magnify rounding by 1/μ."""
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.Tanh()), nn.BatchNorm1d(4), nn.Linear(4, 10)
    ).double()
    method = hosfl(net, optim.sgd(0.1, momentum=0.9), perturbations=perturbations)
    one, other = (run(world(method, (9, 8, 3), engine=engine), 4) for engine in ENGINES)
    for a, b in ((one.client, other.client), (one.server, other.server), (one.report, other.report)):
        agree(a.tree, b.tree, 1e-9)


def test_a_round_is_a_fresh_batch_of_every_client() -> None:
    """Algorithm 1, 8: the first one of a new shuffle each round."""
    seen: list[Tensor] = []

    @dataclass
    class Watching:
        """Notes labels as they go up."""

        def stepped(self, sizes: Any) -> None: ...

        def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
            if kind is LABELS:
                seen.append(value.at(0))

        def waited(self, ids: tuple[int, ...]) -> None: ...

        def sent(self, kind: Kind, origin: Place, to: Place, value: PerClient) -> None: ...

    run(world(hosfl(), meters=(Watching(),)), 4)
    data, partition = images(sum(EQUAL)), clients_of(EQUAL)
    assert len(seen) == 4
    for number, labels in enumerate(seen):
        assert torch.equal(labels, data.y[walk(partition, number=number).samples(0, 0)])


# -- passes ahead ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_passes_ahead_change_no_bit(engine: str) -> None:
    opt = optim.adamw(0.01)
    reference = run(world(hosfl(opt=opt), per_round=3, engine=engine), 4)
    for overlap in range(1, P + 1):
        found = run(world(hosfl(opt=opt, overlap=overlap), per_round=3, engine=engine), 4)
        assert same(found.client.tree, reference.client.tree) and same(found.server.tree, reference.server.tree)
        assert torch.equal(found.memory.log.tree.slopes, reference.memory.log.tree.slopes)


@pytest.mark.parametrize("overlap", (0, 2))
def test_the_cut_tensors_that_they_hold_are_reported(overlap: int) -> None:
    data = images(sum(EQUAL))
    result = train(hosfl(overlap=overlap), data, clients_of(EQUAL), rounds=2, batching=Batching(size=4), engine="loop")
    assert [record["extra_cut_tensors"] for record in result.history] == [overlap] * 2
    assert [record["history_rounds"] for record in result.history] == [0, 0]  # nobody is behind


def test_passes_ahead_are_the_first_passes_and_no_more() -> None:
    method = hosfl(overlap=2)
    part, x, seeds = PLAIN.begin(method.model.initial()[0], 0), images(4).x, seeds_of(0)
    ahead = method.client.ahead(part, x, None, seeds)
    assert len(ahead) == 2
    for z, seed in zip(ahead, seeds, strict=False):
        own = part._replace(params=directions.shifted(part.params, seed, method.smoothing))
        assert torch.equal(z, method.model.lower(own, x, None)[0])


# -- what crosses ------------------------------------------------------------------------------------------------------

MOMENTS: dict[str, tuple[optim.Transform, int]] = {  # vectors that a newcomer downloads: the layers and their moments
    "sgd": (PLAIN, 1),
    "momentum": (optim.sgd(0.1, momentum=0.9), 2),
    "adamw": (optim.adamw(0.01), 3),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MOMENTS)
def test_bytes_of_every_client(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up 4bA + 8b + 8P; down 4bA + 8P + 8P + 16P for each missed round; and the layers once, for a newcomer."""
    opt, vectors = MOMENTS[name]
    turns = ((0, 1, 2), (0, 1), (0,), (0, 2), (0, 3), (0, 1, 2, 3))
    missed = {0: 0, 1: 0 + 3, 2: 2 + 1, 3: 0}  # in all rounds together
    batch = {0: 4, 1: 4, 2: 4, 3: 3}
    take_turns(monkeypatch, *turns)
    sim = world(hosfl(smooth(torch.float32), opt), (8, 8, 8, 3), engine=engine)
    run(sim, len(turns))
    for j, b in batch.items():
        rounds = sum(j in turn for turn in turns)
        assert sim.ledger.per_client[j] == {
            "up_activations": rounds * 4 * b * WIDTH,
            "up_labels": rounds * 8 * b,
            "up_slopes": rounds * 8 * P,
            "down_gradients": rounds * 4 * b * WIDTH,
            "down_slopes": rounds * (8 * P + 8 * P) + 16 * P * missed[j],
            "down_setup": vectors * 4 * NUM_LOWER,
            "down_settings": 8,
        }
        assert sim.ledger.trips[j] == 2 * rounds
    assert not [kind for kind in sim.ledger.totals if "model" in kind or "inter_server" in kind]
    assert sim.ledger.samples == sum(batch[j] for turn in turns for j in turn)


def test_bytes_do_not_depend_on_passes_ahead() -> None:
    plain, ahead = (world(hosfl(overlap=k), per_round=3) for k in (0, P))
    assert (run(plain, 4).round, run(ahead, 4).round) == (4, 4)
    assert plain.ledger.content() == ahead.ledger.content()


def test_frozen_layers_come_with_a_newcomers_download() -> None:
    split = Split(frozen().float(), 2)
    sim = simulation(methods.hosfl(model=split, client_opt=PLAIN, server_opt=PLAIN), images(dtype=torch.float32))
    lower = sim.start().client.tree
    run(sim, 2)
    numbers = sum(v.numel() for v in (*lower.params.values(), *lower.frozen.values()))
    assert {j: c["down_setup"] for j, c in sim.ledger.per_client.items()} == dict.fromkeys(range(5), 4 * numbers)


# -- the laws ----------------------------------------------------------------------------------------------------------


@method
@dataclass(frozen=True, kw_only=True)
class Curious:
    """A method that asks HO-SFL's clients for whatever a test wants to know."""

    model: Split
    client: HybridClient
    story: Callable[["Scene"], Any]

    def start(self, server: Server, fed: Fed) -> State:
        lower, upper = self.model.initial()
        return State(0, fed.hold(PLAIN.begin(lower, 0)), server.hold(upper), {})

    def round(self, state: State, clients: Clients, server: Server, fed: Fed) -> State:
        self.story(Scene(self, state, clients, server, fed))
        return state


class Scene:
    """One lawful step, and everything that the clients hold by then."""

    def __init__(self, me: Curious, state: State, clients: Clients, server: Server, fed: Fed) -> None:
        self.clients, self.server, self.fed, client = clients, server, fed, me.client
        self.seeds = clients.down(SLOPES, fed.hold(seeds_of(0)))
        model, moments = (fed.do(part, state.client) for part in (_model, _moments))
        whole = [clients.down(SETUP, value) for value in (model, moments)]
        self.c = clients.do(client.adopt, *whole, clients.down(SETTINGS, 0))
        (self.step,) = clients.steps(count=1)
        self.z = clients.do(client.forward, self.c, self.step.x, self.step.key)
        self.ahead = clients.do(client.ahead, self.c, self.step.x, self.step.key, self.seeds)
        self.at_server = clients.up(ACTIVATIONS(self.z))
        self.cut = clients.down(GRADIENTS, self.at_server)
        self.v = clients.do(client.slopes, self.c, self.step.x, self.step.key, self.seeds, self.z, self.cut)
        self.at_fed = clients.up(SLOPES(self.v))
        self.new = clients.do(client.update, self.c, self.seeds, clients.down(SLOPES, fed.mean(self.at_fed)))


def _model(part: Part) -> Any:
    return part.model


def _moments(part: Part) -> Any:
    return part.moments


REFUSES = "client 0 refuses to send {0}: the value was not made by a function of Curious that gives {0} (it gives {1})"
NOTHING = "nothing that may leave whole"
FORBIDDEN: dict[str, tuple[Callable[[Scene], Any], str]] = {
    "slopes to the training server": (
        lambda s: s.clients.up(SCALARS(s.v)),
        REFUSES.format("scalars", "slopes"),
    ),
    "slopes as activations": (lambda s: s.clients.up(ACTIVATIONS(s.v)), REFUSES.format("activations", "slopes")),
    "perturbed activations": (lambda s: s.clients.up(ACTIVATIONS(s.ahead)), REFUSES.format("activations", NOTHING)),
    "activations to the fed server": (lambda s: s.clients.up(SLOPES(s.z)), REFUSES.format("slopes", "activations")),
    "the layers": (lambda s: s.clients.up(MODEL(s.c.model)), REFUSES.format("model", NOTHING)),
    "the updated layers": (lambda s: s.clients.up(MODEL(s.new.model)), REFUSES.format("model", NOTHING)),
    "inputs": (lambda s: s.clients.up(ACTIVATIONS(s.step.x)), REFUSES.format("activations", NOTHING)),
    "the gradient it was sent": (lambda s: s.clients.up(GRADIENTS(s.cut)), REFUSES.format("gradients", NOTHING)),
    "slopes at the training server": (
        lambda s: s.server.each(all_finite, s.at_fed),
        "the server place was given a value that is at the fed",
    ),
    "slopes from the fed server to the other": (
        lambda s: s.fed.send(SLOPES, s.at_fed, s.server),
        "single clients' values go from server to server only as model, whole models, or as statistics, lists of "
        "numbers, and only to the fed place; this goes to the server as slopes",
    ),
    "an update by the training server": (
        lambda s: s.clients.down(SLOPES, s.server.hold(torch.zeros(P))),
        "what goes down as slopes is at the fed, but this value is at the server",
    ),
}


def told(story: Callable[[Scene], Any], engine: str) -> None:
    model = Split(smooth(), 1)
    client = HybridClient(model=model, opt=PLAIN, smoothing=1e-3, overlap=1)
    sim = simulation(
        Curious(model=model, client=client, story=story), images(sum(EQUAL)), clients_of(EQUAL), engine=engine
    )
    sim.round(sim.start())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_scene_itself_is_lawful(engine: str) -> None:
    seen: list[Scene] = []
    told(seen.append, engine)
    assert seen[0].at_fed.place == "fed" and seen[0].at_fed.row(0).dtype == torch.float64


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", FORBIDDEN)
def test_clients_and_servers_refuse(name: str, engine: str) -> None:
    story, message = FORBIDDEN[name]
    with pytest.raises(LawError) as caught:
        told(story, engine)
    assert str(caught.value) == message


def test_what_each_server_holds() -> None:
    """The fed server the client's half and the log; the training server its own half."""
    state = run(world(hosfl()), 1)
    assert (state.client.place, state.memory.log.place, state.server.place) == ("fed", "fed", "server")
    assert all(name.startswith("0.") for name in state.client.tree.params)
    assert all(name.startswith("1.") for name in state.server.tree.params)


# -- mistakes ----------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "overlap above P": (
        {"perturbations": 3, "overlap": 4},
        "overlap is 4, but it must be a whole number from 0 to 3, the perturbations.",
    ),
    "negative overlap": (
        {"overlap": -1},
        "overlap is -1, but it must be a whole number from 0 to 3, the perturbations.",
    ),
    "half an overlap": (
        {"overlap": 0.5},
        "overlap is 0.5, but it must be a whole number from 0 to 3, the perturbations.",
    ),
    "true overlap": (
        {"overlap": True},
        "overlap is True, but it must be a whole number from 0 to 3, the perturbations.",
    ),
    "no smoothing": ({"smoothing": 0}, "smoothing is 0, but it must be a number above 0."),
    "negative smoothing": ({"smoothing": -1e-3}, "smoothing is -0.001, but it must be a number above 0."),
    "smoothing without end": ({"smoothing": math.inf}, "smoothing is inf, but it must be a number above 0."),
    "no perturbations": ({"perturbations": 0}, "perturbations is 0, but it must be a whole number above 0."),
    "half a perturbation": ({"perturbations": 2.5}, "perturbations is 2.5, but it must be a whole number above 0."),
    "no history": ({"max_history": 0}, "max_history is 0, but it must be a whole number above 0."),
    "joint clipping": (
        {"opt": optim.sgd(0.1, clip=1.0, clip_scope="joint")},
        "HO-SFL cannot clip with clip_scope='joint': its server-side gradient belongs to no single client; "
        "use clip_scope='part'.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_impossible_settings_are_refused(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(ConfigError) as caught:
        hosfl(**options)
    assert str(caught.value) == message


def test_an_unknown_weighing_is_told_with_those_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match="uniform"):
        hosfl(agg="batch")


def test_a_u_shape_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        methods.hosfl(model=Split(resnet("group"), 1, head=4), client_opt=PLAIN, server_opt=PLAIN)
    assert str(caught.value) == "HO-SFL needs the labels and the last layers at the server; leave the head out"


def test_live_batchnorm_at_the_client_is_refused_and_at_the_server_is_not() -> None:
    with pytest.raises(ConfigError) as caught:
        methods.hosfl(model=Split(resnet(), 1), client_opt=PLAIN, server_opt=PLAIN)
    assert str(caught.value) == (
        "HO-SFL needs BatchNorm frozen at the client: put those layers in eval mode and their parameters to "
        "requires_grad=False before the split, as freeze_norms = true (cutlayer.models.freeze_norms) does"
    )
    above = nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.BatchNorm1d(3))
    assert isinstance(methods.hosfl(model=Split(above, 2), client_opt=PLAIN, server_opt=PLAIN), HybridOrder)


@pytest.mark.parametrize("given", ({"steps": 2}, {"epochs": 2}))
def test_a_round_is_told_no_number_of_steps(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError) as caught:
        world(hosfl(), batching=Batching(size=4, **given))
    assert str(caught.value) == (
        f"this method counts the mini-batches of a round itself; leave {next(iter(given))} out of the batching"
    )


def test_training_tells_the_record_of_a_round() -> None:
    training = Training(runner=world(hosfl()), limits=Limits(rounds=1))
    record = training.round()
    assert (record["stopped"], record["samples"], record["extra_cut_tensors"]) == (0, 20, 0)
    assert kept(training.runner, 0).version == 1
