"""Specifies ZO-SFL: exact slopes of a quadratic loss, no bias, what crosses, and that a client stops alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import agree, clients_of, distance, images, resnet, run, simulation, trained, walk
from stopping import SMALL, outcome, stopped, unbroken
from torch import Tensor, nn
from zeroth_by_hand import (
    client_direction,
    correlation,
    difference,
    digits_net,
    dot,
    flat,
    gradient,
    loss,
    quadratic,
    samples,
    server_direction,
    stepped,
)

import cutlayer
from cutlayer import methods, models, optim
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.kinds import SCALARS, Kind
from cutlayer.core.meter import Direction
from cutlayer.core.state import Model, Tensors
from cutlayer.core.values import PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.meters.ledger import Ledger
from cutlayer.methods.zo_sfl import ZerothOrder, zo_sfl
from cutlayer.planning.devices import Device, Devices
from cutlayer.runs.config import Choice
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

ONE_STEP = Batching(size=4, steps=1)
SINGLE = 1e-6  # slopes travel in single precision


class Slopes(Ledger):
    """A meter that notes what comes down, client by client."""

    def __init__(self) -> None:
        super().__init__()
        self.down: dict[int, list[Tensor]] = {}

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        super().crossed(kind, direction, value)
        for j in value.ids if (kind, direction) == (SCALARS, "down") else ():
            self.down.setdefault(j, []).append(value.at(j))


def method(split: Split | None = None, lr: float = 0.1, **options: Any) -> ZerothOrder:
    return zo_sfl(model=split or quadratic(), client_opt=optim.sgd(lr), server_opt=optim.sgd(lr), **options)


def halves(sim: Simulation) -> tuple[Model, Model]:
    """Return both halves after a round."""
    state = run(sim, 1)
    return state.client.tree, state.server.tree


def start(split: Split) -> Tensors:
    lower, upper = split.initial()
    return lower.joined(upper).params


# -- the estimate ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ("loop", "vmap"))
@pytest.mark.parametrize("smoothing", (1e-3, 1.0, 30.0))
def test_the_slope_of_a_quadratic_loss_is_exact_for_any_smoothing(smoothing: float, engine: str) -> None:
    split, data, partition, meter = quadratic(), samples(), clients_of((12, 8)), Slopes()
    sim = simulation(
        method(split, smoothing=smoothing), data, partition, batching=ONE_STEP, engine=engine, meters=(meter,)
    )
    run(sim, 1)
    lower, upper = split.initial()
    for j in range(2):
        below, above = gradient(split, lower, upper, data.take(walk(partition).samples(j, 0)))
        slope = dot(below, client_direction(lower, 0, j)) + dot(above, server_direction(upper, 0, j))
        (sent,) = meter.down[j]
        assert sent.dtype == torch.float32
        agree(sent.double(), slope, SINGLE)


def test_a_loss_that_is_not_quadratic_has_an_error_of_the_smoothings_square() -> None:
    data, partition = images(8), clients_of((8,))
    net = Split(digits_net().double(), 2)
    lower, upper = net.initial()
    below, above = gradient(net, lower, upper, data.take(walk(partition).samples(0, 0)))
    slope = dot(below, client_direction(lower, 0, 0)) + dot(above, server_direction(upper, 0, 0))
    errors = []
    for smoothing in (0.02, 0.01):
        meter = Slopes()
        run(simulation(method(net, smoothing=smoothing), data, partition, batching=ONE_STEP, meters=(meter,)), 1)
        errors.append(float(meter.down[0][0].double() - slope))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.02)


def test_the_estimate_is_the_gradient_in_expectation() -> None:
    """3000 clients with the same batch, each with directions of its own: their mean step is the gradient's."""
    split, data, num = quadratic(), samples(4), 3000
    alike = Partition((np.arange(4),) * num)
    lower, upper = split.initial()
    below, above = gradient(split, lower, upper, data)
    client, server = halves(simulation(method(split, lr=1.0), data, alike, batching=ONE_STEP, engine="vmap"))
    exact = torch.cat((flat(below), flat(above)))
    start, end = (torch.cat((flat(a.params), flat(b.params))) for a, b in ((lower, upper), (client, server)))
    error = (exact.square().sum() + exact.square()).div(num).sqrt()  # the variance of (u·g) u_i is |g|² + g_i²
    assert exact.norm() > 20 * error.max()
    assert ((start - end - exact).abs() < 3 * error).all()


def local(split: Split, ends: tuple[Model, Model], data: Arrays, batches: Walk, number: int, j: int) -> Tensors:
    """A client's own steps by hand, at a learning rate of 0.05, until a slope is not finite."""
    c, s = ends
    for step in range(batches.per_round(j)):
        below, above = gradient(split, c, s, data.take(batches.samples(j, step)))
        u, v = client_direction(c, number, j, step), server_direction(s, number, j, step)
        slope = (dot(below, u) + dot(above, v)).float()
        if not slope.isfinite():
            break
        c, s = stepped(c, u, -0.05 * slope), stepped(s, v, -0.05 * slope)
    return c.joined(s).params


def test_rounds_by_hand() -> None:
    """Ragged clients take local steps along their own directions; then come the means by their samples."""
    split, data, sizes = quadratic(), samples(), (12, 20, 8)
    partition = clients_of(sizes)
    ends = split.initial()
    for number in range(2):
        batches = walk(partition, number=number)
        found = [local(split, ends, data, batches, number, j) for j in range(3)]
        shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
        mean = {k: torch.tensordot(shares, torch.stack([f[k] for f in found]), 1) for k in found[0]}
        lower, upper = (half._replace(params={k: mean[k] for k in half.params}) for half in ends)
        ends = lower, upper
    assert distance(mean, start(split)) > 0.01
    agree(trained(method(split, lr=0.05), data, partition, rounds=2), mean, SINGLE)


def test_the_directions_of_client_and_server_of_clients_and_of_steps_have_nothing_in_common() -> None:
    split = quadratic(hidden=1000)  # 4000 weights at the client, 1001 at the server
    lower, upper = split.initial()
    c, s = halves(simulation(method(split), samples(8), clients_of((8,)), batching=ONE_STEP))
    moved_c, moved_s, own = difference(c, lower), difference(s, upper), flat(client_direction(lower, 0, 0))
    assert correlation(moved_c, own) > 0.999
    assert correlation(moved_s, flat(server_direction(upper, 0, 0))) > 0.999
    assert correlation(moved_c[:1001], moved_s) < 3 / 1001**0.5
    others = (client_direction(lower, 0, 1), client_direction(lower, 0, 0, step=1), client_direction(lower, 1, 0))
    assert max(correlation(own, flat(other)) for other in others) < 3 / 4000**0.5


def test_the_loss_of_a_round_is_the_mean_of_both_ways() -> None:
    split, data, partition = quadratic(), samples(8), clients_of((8,))
    state = run(simulation(method(split, smoothing=0.5), data, partition, batching=ONE_STEP), 1)
    lower, upper = split.initial()
    u, v, batch = client_direction(lower, 0, 0), server_direction(upper, 0, 0), data.take(walk(partition).samples(0, 0))
    plus, minus = (loss(split, stepped(lower, u, size), stepped(upper, v, size), batch) for size in (0.5, -0.5))
    assert abs(plus - minus) > 0.1
    agree(state.report.tree.loss, (plus + minus) / 2)


def test_dropout_is_the_same_in_both_passes() -> None:
    """Masks of their own would make the difference of the losses large, whatever the smoothing."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 10)).double()
    meter = Slopes()
    sim = simulation(method(Split(net, 3), smoothing=1e-6), images(8), clients_of((8,)), meters=(meter,))
    run(sim, 1)
    assert max(float(slope.abs()) for slope in meter.down[0]) < 100


# -- what crosses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ("loop", "vmap"))
def test_the_bytes_are_twice_sfls_activations_and_four_a_step_down(engine: str) -> None:
    def ledger(name: str) -> Ledger:
        opt = optim.sgd(0.01)
        made = methods.build(name, Split(resnet("group", torch.float32), 1), opt, opt)
        sim = simulation(made, images(dtype=torch.float32), engine=engine)
        run(sim, 2)
        return sim.ledger

    zeroth, first = ledger("zo_sfl"), ledger("sfl_v1")
    steps = {0: 3, 1: 5, 2: 2, 3: 5, 4: 1}
    for j, bytes_ in zeroth.per_client.items():
        sfl = first.per_client[j]
        assert bytes_ == {
            "up_activations": 2 * sfl["up_activations"],
            "up_labels": sfl["up_labels"],
            "down_scalars": 2 * 4 * steps[j],
            "down_model": sfl["down_model"],
            "up_model": sfl["up_model"],
            "down_settings": sfl["down_settings"],
        }
    lower, _ = Split(resnet("group"), 1).initial()
    assert first.per_client[0]["up_model"] == 2 * 4 * sum(p.numel() for p in lower.params.values())
    assert zeroth.trips == first.trips


def test_a_client_computes_two_forward_passes_a_step_where_sfls_counts_three() -> None:
    devices = Devices(clients=(Device(flops=1e6, up=1e6, down=1e6),) * 5, server=1e7)
    flops = {}
    for name in ("zo_sfl", "sfl_v1"):
        opt = optim.sgd(0.01)
        sim = simulation(methods.build(name, Split(resnet("group"), 2), opt, opt), devices=devices)
        run(sim, 1)
        assert sim.clock is not None
        flops[name] = sim.clock.client_flops
    assert flops["sfl_v1"] > 0
    assert flops["zo_sfl"] / flops["sfl_v1"] == pytest.approx(2 / 3, rel=1e-12)


# -- engines, resuming, stopping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", (0, 1, 5))
@pytest.mark.parametrize("opt", (optim.sgd(0.01, momentum=0.9), optim.adamw(1e-3)), ids=("momentum", "adamw"))
def test_vmap_gives_the_loop_engines_numbers(opt: optim.Transform, cut: int) -> None:
    def on(engine: str, **options: Any) -> Tensors:
        made = zo_sfl(model=Split(resnet("group"), cut), client_opt=opt, server_opt=opt)
        return trained(made, engine=engine, **options)

    loop = on("loop")
    agree(on("vmap"), loop, 1e-9)
    if cut == 1:
        agree(on("vmap", chunk=2), loop, 1e-9)


def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path) -> None:
    small = replace(SMALL, model=Choice("cnn", {"width": 2}), method=Choice("zo_sfl"), rounds=3)
    folder = Folder(tmp_path / "stopped")
    execute(small, stopped(small, folder, 2), resume=True)
    assert outcome(folder) == outcome(unbroken(small, tmp_path))


@pytest.mark.parametrize("engine", ("loop", "vmap"))
@pytest.mark.parametrize("bad", (torch.nan, 1e200), ids=("input", "slope"))  # 1e200: too much for single precision
def test_a_client_whose_slope_is_not_finite_stops_alone(bad: float, engine: str) -> None:
    data, split, partition = samples(24), quadratic(), clients_of((12, 12))
    batches = walk(partition)
    data.x[torch.from_numpy(batches.samples(1, 1))] = bad  # the second of three batches
    made = method(split, lr=0.05, agg="uniform")
    state = run(simulation(made, data, partition, engine=engine), 1)
    ends = [local(split, split.initial(), data, batches, 0, j) for j in range(2)]
    assert min(distance(end, start(split)) for end in ends) > 1e-3
    agree(made.model.export(methods.global_model(state)), {k: (v + ends[1][k]) / 2 for k, v in ends[0].items()}, SINGLE)
    total, num_batches, num_stopped = (float(v) for v in state.report.tree)
    assert (num_batches, num_stopped) == (4, 1)
    assert abs(total) < 10


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_trained_are_refused() -> None:
    opt = optim.sgd(0.1)
    with pytest.raises(ConfigError) as u_shape:
        method(Split(resnet("group"), 1, head=4))
    assert str(u_shape.value) == "ZO-SFL needs the labels and the last layers at the server; leave the head out"
    how = (
        ": put those layers in eval mode and their parameters to requires_grad=False before the split, as "
        "freeze_norms = true (cutlayer.models.freeze_norms) does"
    )
    with pytest.raises(ConfigError) as live:
        method(Split(resnet("batch"), 1))
    assert str(live.value) == f"ZO-SFL needs BatchNorm frozen at the client{how}"
    with pytest.raises(ConfigError) as at_server:
        method(Split(resnet("batch"), 0))
    assert str(at_server.value) == f"ZO-SFL needs BatchNorm frozen at the server{how}"
    with pytest.raises(ConfigError) as joint:
        zo_sfl(model=quadratic(), client_opt=opt, server_opt=optim.sgd(0.1, clip=1.0, clip_scope="joint"))
    assert str(joint.value) == (
        "ZO-SFL cannot clip with clip_scope='joint': its server-side gradient belongs to no single client; "
        "use clip_scope='part'."
    )
    with pytest.raises(ConfigError, match=r"^smoothing is 0, but it must be a number above 0\.$"):
        method(smoothing=0)
    with pytest.raises(UnknownNameError) as agg:
        method(agg="sample")
    assert str(agg.value) == "unknown agg 'sample'; did you mean 'samples'?"


def test_frozen_batchnorm_is_no_hindrance_and_does_not_move() -> None:
    net = resnet("batch")
    models.freeze_norms(net)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    after = trained(method(Split(net, 1), lr=0.01), engine="vmap")
    moved = {k for k in after if not torch.allclose(after[k].double(), before[k].double(), rtol=0, atol=1e-12)}
    assert moved == {k for k, p in net.named_parameters() if p.requires_grad}


# -- learning ----------------------------------------------------------------------------------------------------------


def test_zo_sfl_learns_the_digits() -> None:
    digits, opt = cutlayer.load("digits"), optim.adam(0.03)
    result = cutlayer.train(
        zo_sfl(model=Split(digits_net(), 2), client_opt=opt, server_opt=opt),
        digits.train,
        cutlayer.iid(len(digits.train), 8, key=0),
        rounds=10,
        batching=Batching(size=16),
        engine="vmap",
        test=digits.test,
        eval_every=10,
    )
    losses = [record["loss"] for record in result.history]
    assert losses[-1] < 0.75 * losses[0]
    assert result.history[-1]["test_accuracy"] > 0.5
