"""Specifies SMoFi: how momenta are fused after each step, what it is equal to, and what it leaves untouched."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NUM_UNITS, agree, clients_of, distance, images, resnet, run, sgd_by_hand, simulation, trained, walk
from one_weight import Weight, alike, mean_output, weight
from torch import Tensor

from cutlayer import methods, optim
from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.kinds import Kind
from cutlayer.core.meter import Direction, Meter
from cutlayer.core.places import Step
from cutlayer.core.program import Program
from cutlayer.core.servers import Server
from cutlayer.core.state import Part, State
from cutlayer.core.values import PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.methods.splitfed import SplitFed
from cutlayer.pieces.client import SplitClient
from cutlayer.pieces.fuse import Fuse
from cutlayer.pieces.outer import HeavyBall
from cutlayer.split import Split

ENGINES = ("loop", "vmap")
PLAIN, MOMENTUM = optim.sgd(0.1), optim.sgd(0.05, momentum=0.9)


def smofi(opt: optim.Transform = MOMENTUM, cut: int = 1, head: int | None = None, **options: Any) -> SplitFed:
    method = methods.smofi(model=Split(resnet(), cut, head=head), client_opt=opt, server_opt=opt, **options)
    assert isinstance(method, SplitFed)
    return method


def sfl_v1(opt: optim.Transform = MOMENTUM, cut: int = 1, head: int | None = None, **options: Any) -> SplitFed:
    return methods.sfl_v1(model=Split(resnet(), cut, head=head), client_opt=opt, server_opt=opt, **options)


# -- Watching the fusion -----------------------------------------------------------------------------------------------


class Listening:
    """A server that records all sums that are asked of it."""

    def __init__(self, server: Server, heard: list[Any]) -> None:
        self._server, self._heard = server, heard

    def sum(self, *args: Any) -> Any:
        total = self._server.sum(*args)
        self._heard.append(total.tree)
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


class Watched:
    """A fusion that keeps the last round's fused momenta, and everyone's part before and after each step's fusion."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse, self.barrier = fuse, fuse.barrier
        self._forget()

    def _forget(self) -> None:
        self.fused: list[dict[str, dict[str, Tensor]]] = []
        self.before: list[dict[int, Part]] = []
        self.after: list[dict[int, Part]] = []
        self.staying: list[tuple[int, ...]] = []

    def __call__(self, server: Server, opt: optim.Transform, s: PerClient, step: Step) -> None:
        if step.number == 0:
            self._forget()
        self.before.append({j: s.row(j) for j in s.ids})
        self.fuse(Listening(server, self.fused), opt, s, step)  # type: ignore[arg-type]
        self.after.append({j: s.row(j) for j in s.ids})
        self.staying.append(step.staying.ids)


def watch(method: SplitFed, *args: Any, rounds: int = 1, **options: Any) -> tuple[Watched, State]:
    watched = Watched(method.fuse)
    return watched, run(simulation(replace(method, fuse=watched), *args, **options), rounds)


# -- One weight at the server, and gradients that are given ------------------------------------------------------------


def fourth_power(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0] - y).pow(4).mean() / 4


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return (out[:, 0] - y).pow(2).mean() / 2


def nan_below(out: Tensor, y: Tensor) -> Tensor:
    """The mean output, until an output falls to its y."""
    return torch.where(out[:, 0] > y, out[:, 0], torch.nan).mean()


def scalar(
    opt: optim.Transform, x: Sequence[float], sizes: Sequence[int], y: Sequence[float] | None = None, **options: Any
) -> tuple[SplitFed, Arrays, Partition]:
    """SMoFi without global momentum, on clients whose samples are all alike."""
    loss, world = options.pop("loss", mean_output), {"beta": 0.0, **options}
    split = Split(Weight(), 1, loss=loss)
    method = methods.smofi(model=split, client_opt=opt, server_opt=opt, **world)
    assert isinstance(method, SplitFed)
    return method, alike(x, y or [0.0] * len(x), sizes), clients_of(sizes)


def fused(watched: Watched, kind: str = "momentum") -> list[float]:
    return [float(moments[kind]["1.weight"]) for moments in watched.fused]


# Two clients with g = (1, 3), T = (1, 3), η = 1 and β = 1/2. First m = (1, 3), so m̄ = 2 and then m = 4. The finished
# client's 1 counts s₁ at its first step of age and s₂ at its second: m̄ = (4 + s₁)/2, m = m̄/2 + 3, m̄ = (m + s₂)/2.
BY_HAND = {
    "the numeric example": (-1.0, 1, (2.0, 2.25, (4.125 + 1 / 3) / 2), -11.125),  # s = 1/2, 1/3
    "the literal offset": (-1.0, 0, (2.0, 2.5, 2.375), -11.25),  # s = 1, 1/2
    "forgetting at once": (-1e3, 1, (2.0, 2.0, 2.0), -11.0),  # s = 0: the denominator is still 2
    "forgetting after a step": (-1e3, 0, (2.0, 2.5, 2.125), -11.25),  # s = 1, 0
    "never forgetting": (0.0, 1, (2.0, 2.5, 2.625), -11.25),  # s = 1
    "hardly forgetting": (-1e-14, 1, (2.0, 2.5, 2.625), -11.25),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("case", BY_HAND)
def test_fused_momenta_by_hand(case: str, engine: str) -> None:
    alpha, offset, momenta, last = BY_HAND[case]
    world = scalar(optim.sgd(1.0, momentum=0.5), (1.0, 3.0), (2, 6), alpha=alpha, staleness_offset=offset)
    watched, state = watch(*world, batching=Batching(size=2), engine=engine)
    assert fused(watched) == pytest.approx(momenta, abs=1e-12)
    assert [weight(watched.after[-1][j]) for j in (0, 1)] == pytest.approx([-1.0, last], abs=1e-12)
    assert weight(state.server.tree) == pytest.approx(-1 / 4 + last * 3 / 4, abs=1e-12)  # p = (1/4, 3/4)
    if case == "the numeric example":
        assert weight(state.server.tree) == -8.59375


Rule = Callable[[float, list[float], int], tuple[float, list[float]]]


def nesterov(g: float, m: list[float], t: int) -> tuple[float, list[float]]:
    momentum = 0.5 * m[0] + g
    return 0.1 * (g + 0.5 * momentum), [momentum]


def adam(g: float, m: list[float], t: int) -> tuple[float, list[float]]:
    first, second = 0.8 * m[0] + 0.2 * g, 0.9 * m[1] + 0.1 * g**2
    return 0.1 * (first / (1 - 0.8**t)) / ((second / (1 - 0.9**t)) ** 0.5 + 1e-8), [first, second]


ADAM = {"betas": (0.8, 0.9)}
RULES: dict[str, tuple[optim.Transform, Rule, float]] = {  # with what decoupled weight decay leaves of a value
    "nesterov": (optim.sgd(0.1, momentum=0.5, nesterov=True), nesterov, 1.0),
    "adam": (optim.adam(0.1, **ADAM), adam, 1.0),
    "adamw": (optim.adamw(0.1, weight_decay=0.5, **ADAM), adam, 0.95),
}


def paper(rule: Rule, gradients: Sequence[float], steps: Sequence[int], alpha: float, kept: float) -> Any:
    """Equations 3 to 6 with plain numbers: the fused moments after each step, and everyone's last value."""
    num, values = len(steps), [0.0] * len(steps)
    mean: list[float] = [0.0, 0.0]
    history: dict[int, list[float]] = {}
    told = []
    for tau in range(max(steps)):
        moments = {}
        for j in (j for j in range(num) if tau < steps[j]):
            move, moments[j] = rule(gradients[j], mean, tau + 1)
            values[j] = kept * values[j] - move
        stale = {j: (tau - (steps[j] - 1) + 1) ** alpha for j in history}
        counted = [*moments.values(), *([stale[j] * m for m in history[j]] for j in history)]
        mean = [sum(of_kind) / num for of_kind in zip(*counted, strict=True)]
        history |= {j: moments[j] for j in moments if tau == steps[j] - 1}
        told.append(mean)
    return told, values


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", RULES)
def test_every_moment_is_fused_and_no_count(name: str, engine: str) -> None:
    opt, rule, kept = RULES[name]
    steps, slopes = (1, 5, 2, 4), (1.0, 3.0, -2.0, 0.5)
    watched, _ = watch(
        *scalar(opt, slopes, [2 * n for n in steps], alpha=-0.7), batching=Batching(size=2), engine=engine
    )
    moments, values = paper(rule, slopes, steps, -0.7, kept)
    found = [[float(of_kind["1.weight"]) for of_kind in m.values()] for m in watched.fused]
    agree(torch.tensor(found, dtype=torch.float64), torch.tensor(moments, dtype=torch.float64))
    assert [weight(part) for part in watched.after[-1].values()] == pytest.approx(values, abs=1e-12)
    assert [part.count for part in watched.after[-1].values()] == list(steps)


# -- With equal steps and weights --------------------------------------------------------------------------------------


def test_the_mean_copy_takes_momentum_steps_and_gaps_grow_without_momentum() -> None:
    """Of the loss (w x − y)⁴ / 4, so that gradients differ from copy to copy."""
    x, y, lr, beta = (1.0, 0.5, -0.7), (1.0, -1.0, 0.3), 0.1, 0.9
    world = scalar(optim.sgd(lr, momentum=beta), x, (2, 2, 2), y, loss=fourth_power)
    watched, _ = watch(*world, batching=Batching(size=2, epochs=12))
    w, mean = np.zeros(3), 0.0
    for after, momentum in zip(watched.after, fused(watched), strict=True):
        g = (w * x - np.array(y)) ** 3 * x
        new = np.array([weight(after[j]) for j in range(3)])
        assert momentum == pytest.approx(beta * mean + g.mean(), abs=1e-12)
        assert new.mean() == pytest.approx(w.mean() - lr * momentum, abs=1e-12)
        assert np.subtract.outer(new, new) == pytest.approx(
            np.subtract.outer(w, w) - lr * np.subtract.outer(g, g), abs=1e-12
        )
        w, mean = new, momentum
    assert np.ptp(w) > 0.1


def test_quadratic_losses_with_one_hessian_make_it_centralised_momentum() -> None:
    y = (1.0, -4.0, 2.0)
    world = scalar(optim.sgd(0.1, momentum=0.9), (1.0,) * 3, (2, 2, 2), y, loss=half_square)
    watched, state = watch(*world, batching=Batching(size=2, epochs=10))
    net = Weight()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for after in watched.after:
        opt.zero_grad()
        half_square(net(torch.ones(3, 1, dtype=torch.float64)), torch.tensor(y, dtype=torch.float64)).backward()
        opt.step()
        assert np.mean([weight(part) for part in after.values()]) == pytest.approx(net[1].weight.item(), abs=1e-12)
    assert weight(state.server.tree) == pytest.approx(net[1].weight.item(), abs=1e-12)


def test_identical_clients_keep_identical_copies() -> None:
    alike = Partition((np.arange(4),) * 3)
    watched, _ = watch(smofi(beta=0.0), partition=alike, batching=Batching(size=4, epochs=3))
    for parts in watched.after:
        agree(parts[1].params, parts[0].params)
        agree(parts[2].params, parts[0].params)


# -- What it is equal to -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", (0, 1, 3, NUM_UNITS))
def test_with_one_client_it_is_momentum_on_the_unsplit_model(cut: int) -> None:
    """The momentum starts over each round."""
    alone, data, net = clients_of((20,)), images(20), resnet()
    for number in range(2):
        batches = [walk(alone, number=number).samples(0, step) for step in range(5)]
        expected = sgd_by_hand(net, data, batches, lr=0.05, momentum=0.9)
    agree(trained(smofi(beta=0.0, cut=cut), data, alone), expected)


@pytest.mark.parametrize("cut", range(NUM_UNITS + 1))
def test_without_alignment_it_is_fedavgm_at_every_cut(cut: int) -> None:
    fedavgm = trained(methods.build("fedavgm", Split(resnet(), cut), MOMENTUM, MOMENTUM, beta=0.4), rounds=3)
    agree(trained(smofi(align=False, beta=0.4, cut=cut), rounds=3), fedavgm)


def test_without_alignment_it_is_sfl_v1_with_global_momentum() -> None:
    with_momentum = replace(sfl_v1(), outer=HeavyBall(0.4))
    agree(trained(smofi(align=False, beta=0.4)), trained(with_momentum), 0)


def test_without_momenta_it_is_sfl_v1() -> None:
    """The clients may have theirs."""
    made = {"model": Split(resnet(), 1), "client_opt": MOMENTUM, "server_opt": PLAIN}
    agree(trained(methods.smofi(**made, beta=0.0)), trained(methods.sfl_v1(**made)))


@pytest.mark.parametrize("cut", (1, 3))
def test_fusing_matters(cut: int) -> None:
    assert distance(trained(smofi(cut=cut)), trained(smofi(cut=cut, align=False))) > 1e-3
    assert distance(trained(smofi(cut=cut)), trained(smofi(cut=cut, alpha=-3.0))) > 1e-4
    assert distance(trained(smofi(cut=cut)), trained(smofi(cut=cut, staleness_offset=0))) > 1e-5


def test_with_all_layers_at_the_client_there_is_nothing_to_fuse() -> None:
    agree(trained(smofi(cut=NUM_UNITS)), trained(smofi(cut=NUM_UNITS, align=False)), 0)


def test_uniform_weights_are_the_models_not_the_momenta() -> None:
    """g = (1, 3), T = (1, 3) as above: the same momenta, and the plain mean of −1 and −11.125."""
    world = scalar(optim.sgd(1.0, momentum=0.5), (1.0, 3.0), (2, 6), alpha=-1.0, agg="uniform")
    watched, state = watch(*world, batching=Batching(size=2))
    assert fused(watched) == pytest.approx(BY_HAND["the numeric example"][2], abs=1e-12)
    assert weight(state.server.tree) == (-1 - 11.125) / 2


# -- What it leaves untouched ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("opt", (MOMENTUM, optim.adam(1e-3)), ids=("momentum", "adam"))
def test_only_the_momenta_of_those_who_go_on_change(opt: optim.Transform, engine: str) -> None:
    """Values, running statistics and counts stay each client's own, and who finishes keeps its momenta."""
    watched, _ = watch(smofi(opt), engine=engine)
    assert watched.staying == [(0, 1, 2, 3), (0, 1, 3), (1, 3), (1, 3), ()]
    for before, after, staying, moments in zip(
        watched.before, watched.after, watched.staying, watched.fused, strict=True
    ):
        for j in before:
            agree(after[j]._replace(moments={}), before[j]._replace(moments={}), 0)
            agree(after[j].moments, moments if j in staying else before[j].moments, 0)
    statistics = watched.after[0][0].buffers
    assert any("running_mean" in name for name in statistics)
    assert all(not torch.equal(v, watched.after[0][1].buffers[k]) for k, v in statistics.items() if "mean" in k)


class Story(Meter):
    """Records everything that crosses, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        shapes = [[a.shape for a in tree.tensors(value.at(j))] for j in value.ids]
        self.told.append((kind.name, direction, value.place, value.ids, shapes))

    def waited(self, ids: tuple[int, ...]) -> None:
        self.told.append(("waited", ids))


@pytest.mark.parametrize("head", (None, 4))
@pytest.mark.parametrize("options", ({}, {"align": False}), ids=("aligned", "not aligned"))
def test_nothing_more_crosses_than_in_sfl_v1(options: dict[str, Any], head: int | None) -> None:
    stories, ledgers = [], []
    for method in (smofi(head=head, **options), sfl_v1(head=head)):
        story = Story()
        sim = simulation(method, meters=(story,))
        run(sim)
        stories.append(story.told)
        ledgers.append(sim.ledger.content())
    assert ledgers[0] == ledgers[1]
    assert stories[0] == stories[1]
    assert len(stories[0]) == 2 * (4 + 5 * (4 if head is None else 7))  # a round of 5 steps


def test_clients_of_smofi_are_those_of_sfl_v1() -> None:
    functions, theirs = Program(smofi()).functions, Program(sfl_v1()).functions
    assert list(functions) == list(theirs)
    for address, function in functions.items():
        assert function.__func__ is vars(SplitClient)[address.removeprefix("client.")]
        assert function.__func__ is theirs[address].__func__


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_that_stops_does_not_spoil_the_fused_momentum(engine: str) -> None:
    """g = (1, 5), T = 3 twice, η = 1, β = 1/2. First m = (1, 5), m̄ = 3. Then the second client's loss is not finite: it
    stands still with the momentum it was given, so m̄ = (2.5 + 3)/2 and (2.375 + 2.75)/2."""
    world = scalar(optim.sgd(1.0, momentum=0.5), (1.0, 5.0), (2, 2), (-1e9, -25.0), loss=nan_below)
    watched, state = watch(*world, batching=Batching(size=2, epochs=3), engine=engine)
    assert fused(watched) == [3.0, 2.75, 2.5625]
    assert [weight(part) for part in watched.after[-1].values()] == [-1 - 2.5 - 2.375, -5.0]
    assert (weight(state.server.tree), float(state.report.tree.stopped)) == ((-5.875 - 5) / 2, 1.0)


# -- Mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "alpha": ({"alpha": 0.1}, "alpha is 0.1, but it must be a number of at most 0."),
    "beta": ({"beta": 1.0}, "beta is 1.0, but it must be a number from 0 up to below 1."),
    "offset": ({"staleness_offset": 2}, "staleness_offset is 2, but it must be 0 or 1."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_options_that_make_no_sense(name: str) -> None:
    options, message = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        methods.build("smofi", Split(resnet(), 1), MOMENTUM, MOMENTUM, **options)
    assert str(caught.value) == message


def test_an_unknown_weight_of_the_models() -> None:
    with pytest.raises(UnknownNameError, match="unknown agg 'sample'"):
        smofi(agg="sample")
