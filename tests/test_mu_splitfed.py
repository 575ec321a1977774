"""Specifies MU-SplitFed: rounds by hand, SGD in expectation, what crosses, and that a client stops alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import agree, clients_of, distance, images, resnet, run, simulation, trained, walk
from stopping import SMALL, outcome, stopped, unbroken
from torch import Tensor
from zeroth_by_hand import (
    client_direction,
    correlation,
    difference,
    digits_net,
    dot,
    flat,
    gradient,
    quadratic,
    samples,
    server_direction,
    stepped,
)

import cutlayer
from cutlayer import methods, optim
from cutlayer.core.batches import Batching
from cutlayer.core.state import Model, Tensors
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.meters.ledger import Ledger
from cutlayer.methods.mu_splitfed import UnbalancedZeroth, mu_splitfed
from cutlayer.runs.config import Choice
from cutlayer.runs.run import Folder, execute
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

CLIENT_LR, SERVER_LR = 0.05, 0.1
SINGLE = 1e-6  # differences travel in single precision


def method(split: Split | None = None, **options: Any) -> UnbalancedZeroth:
    client_opt, server_opt = optim.sgd(CLIENT_LR), optim.sgd(SERVER_LR)
    return mu_splitfed(model=split or quadratic(), client_opt=client_opt, server_opt=server_opt, **options)


def halves(sim: Simulation) -> tuple[Model, Model]:
    """Return both halves after a round."""
    state = run(sim, 1)
    return state.client.tree, state.server.tree


def squared_output(out: Tensor, y: Tensor) -> Tensor:
    return out.square().mean()


# -- the round ---------------------------------------------------------------------------------------------------------


def local(
    split: Split, ends: tuple[Model, Model], batch: Arrays, number: int, j: int, server_steps: int, delta_model: str
) -> Tensors:
    """One client's step and its copy's by hand, with the gradients of back-propagation; the loss is quadratic."""
    c, s = ends
    for i in range(server_steps):
        v = server_direction(s, number, j, update=i)
        slope = dot(gradient(split, c, s, batch)[1], v)
        s = stepped(s, v, -SERVER_LR * slope)
    u = client_direction(c, number, j)
    slope = dot(gradient(split, c, s if delta_model == "updated" else ends[1], batch)[0], u)
    return stepped(c, u, -CLIENT_LR * slope).joined(s).params


@pytest.mark.parametrize("smoothing", (1e-3, 2.0))
@pytest.mark.parametrize("delta_model", ("updated", "initial"))
@pytest.mark.parametrize("server_steps", (1, 3))
def test_rounds_by_hand(server_steps: int, delta_model: str, smoothing: float) -> None:
    split, data, partition = quadratic(), samples(), clients_of((12, 20, 8))
    ends = split.initial()
    for number in range(2):
        batches = [data.take(walk(partition, number=number).samples(j, 0)) for j in range(3)]
        found = [local(split, ends, b, number, j, server_steps, delta_model) for j, b in enumerate(batches)]
        old = {**ends[0].params, **ends[1].params}
        new = {k: p + 0.3 * (torch.stack([f[k] for f in found]).mean(0) - p) for k, p in old.items()}
        lower, upper = (half._replace(params={k: new[k] for k in half.params}) for half in ends)
        ends = lower, upper
    options: dict[str, Any] = {"server_steps": server_steps, "delta_model": delta_model, "smoothing": smoothing}
    agree(trained(method(split, **options), data, partition, rounds=2), new, SINGLE)


def test_the_server_side_copy_that_tells_the_slope_matters() -> None:
    found = [trained(method(delta_model=which), samples(), clients_of((12, 20))) for which in ("updated", "initial")]
    assert distance(*found) > 1e-4


def test_one_server_step_and_the_initial_copy_are_sgd_in_expectation() -> None:
    """3000 rounds of one client each, side by side: the same batch and model, directions of their own."""
    split, data, num = quadratic(), samples(4), 3000
    alike = Partition((np.arange(4),) * num)
    made = method(split, server_steps=1, global_lr=1.0, delta_model="initial")
    ends = halves(simulation(made, data, alike, batching=Batching(size=4), engine="vmap"))
    exact = gradient(split, *split.initial(), data)
    for lr, end, begin, g in zip((CLIENT_LR, SERVER_LR), ends, split.initial(), map(flat, exact), strict=True):
        error = lr * (g.square().sum() + g.square()).div(num).sqrt()  # the variance of (u·g) u_i is |g|² + g_i²
        assert lr * g.norm() > 15 * error.max()
        assert ((difference(end, begin) + lr * g).abs() < 3 * error).all()


def test_without_a_global_learning_rate_nothing_changes() -> None:
    split = Split(resnet("group"), 1)
    lower, upper = split.initial()
    start = lower.joined(upper).params
    found = trained(method(split, global_lr=0.0), rounds=2)
    assert all(torch.equal(found[k], p) for k, p in start.items())
    assert distance(trained(method(split), rounds=2), start) > 1e-3


def test_samples_weigh_where_asked() -> None:
    data, partition, split = samples(), clients_of((12, 20)), quadratic()
    batches = [data.take(walk(partition).samples(j, 0)) for j in range(2)]
    a, b = (local(split, split.initial(), batch, 0, j, 2, "updated") for j, batch in enumerate(batches))
    found = trained(method(split, agg="samples", global_lr=1.0), data, partition, rounds=1)
    agree(found, {k: (12 * a[k] + 20 * b[k]) / 32 for k in a}, SINGLE)


def test_all_directions_of_a_round_have_nothing_in_common() -> None:
    split = quadratic(hidden=1000)  # 4000 weights at the client, 1001 at the server
    lower, upper = split.initial()
    c, s = halves(simulation(method(split, server_steps=1), samples(8), clients_of((8,))))
    moved_c, moved_s = difference(c, lower), difference(s, upper)
    assert correlation(moved_c, flat(client_direction(lower, 0, 0))) > 0.999
    assert correlation(moved_s, flat(server_direction(upper, 0, 0, update=0))) > 0.999
    assert correlation(moved_c[:1001], moved_s) < 3 / 1001**0.5
    second = flat(server_direction(upper, 0, 0, update=1))
    assert max(correlation(moved_s, second), correlation(moved_c[:1001], second)) < 3 / 1001**0.5


# -- what crosses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ("loop", "vmap"))
def test_the_bytes_are_three_activations_up_a_scalar_down_and_the_model_both_ways(engine: str) -> None:
    def ledger(name: str) -> Ledger:
        opt = optim.sgd(0.01)
        made = methods.build(name, Split(resnet("group", torch.float32), 1), opt, opt)
        sim = simulation(made, images(dtype=torch.float32), engine=engine)
        run(sim, 2)
        return sim.ledger

    zeroth, hybrid = ledger("mu_splitfed"), ledger("hosfl")
    lower, _ = Split(resnet("group"), 1).initial()
    model = 4 * sum(p.numel() for p in lower.params.values())
    for j, bytes_ in zeroth.per_client.items():
        batch = 3 if j == 4 else 4
        at_cut = 4 * batch * 2 * 8 * 8
        assert bytes_ == {
            "up_activations": 2 * 3 * at_cut,
            "up_labels": 2 * 8 * batch,
            "down_scalars": 2 * 4,
            "down_model": 2 * model,
            "up_model": 2 * model,
            "down_settings": 2 * 8,
        }
        assert bytes_["up_activations"] == 3 * hybrid.per_client[j]["up_activations"]
    assert zeroth.trips == dict.fromkeys(range(5), 2 * 2)


# -- engines, resuming, stopping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", (0, 1, 5))
@pytest.mark.parametrize("delta_model", ("updated", "initial"))
def test_vmap_gives_the_loop_engines_numbers(delta_model: str, cut: int) -> None:
    def on(engine: str, **options: Any) -> Tensors:
        return trained(method(Split(resnet("group"), cut), delta_model=delta_model), engine=engine, **options)

    loop = on("loop")
    agree(on("vmap"), loop, 1e-9)
    if cut == 1:
        agree(on("vmap", chunk=2), loop, 1e-9)


def test_a_run_that_was_stopped_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path) -> None:
    small = replace(
        SMALL,
        model=Choice("cnn", {"width": 2}),
        method=Choice("mu_splitfed"),
        optimiser=Choice("sgd", {"lr": 0.005}),
        batching=Batching(size=8),
        rounds=3,
    )
    folder = Folder(tmp_path / "stopped")
    execute(small, stopped(small, folder, 2), resume=True)
    assert outcome(folder) == outcome(unbroken(small, tmp_path))


@pytest.mark.parametrize("engine", ("loop", "vmap"))
@pytest.mark.parametrize("bad", (torch.nan, 1e200), ids=("input", "difference"))  # too much for single precision
def test_a_client_whose_loss_is_not_finite_stops_alone(bad: float, engine: str) -> None:
    data, split, partition = samples(24), quadratic(), clients_of((12, 12))
    data.x[12:] = bad
    lower, upper = split.initial()
    start = lower.joined(upper).params
    state = run(simulation(method(split, global_lr=1.0), data, partition, engine=engine), 1)
    good = local(split, (lower, upper), data.take(walk(partition).samples(0, 0)), 0, 0, 2, "updated")
    assert distance(good, start) > 1e-3
    agree(split.export(methods.global_model(state)), {k: (v + start[k]) / 2 for k, v in good.items()}, SINGLE)
    loss, num_batches, num_stopped = (float(v) for v in state.report.tree)
    assert (num_batches, num_stopped) == (2, 1)  # the two server steps of the first client
    assert abs(loss) < 10


def test_a_client_whose_difference_alone_is_not_finite_is_told_of_as_stopped() -> None:
    """With all layers at the client, only z+ and z- are far enough for a loss beyond single precision."""
    split = Split(quadratic().model, 2, loss=squared_output)
    data = samples(24)
    data.x[12:] *= 1e15
    _, num_batches, num_stopped = run(
        simulation(method(split, smoothing=1e10), data, clients_of((12, 12))), 1
    ).report.tree
    assert (float(num_batches), float(num_stopped)) == (4, 1)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_models_that_cannot_be_trained_are_refused() -> None:
    with pytest.raises(ConfigError) as u_shape:
        method(Split(resnet("group"), 1, head=4))
    assert str(u_shape.value) == "MU-SplitFed needs the labels and the last layers at the server; leave the head out"
    how = (
        ": put those layers in eval mode and their parameters to requires_grad=False before the split, as "
        "freeze_norms = true (cutlayer.models.freeze_norms) does"
    )
    for cut, side in ((1, "client"), (0, "server")):
        with pytest.raises(ConfigError) as live:
            method(Split(resnet("batch"), cut))
        assert str(live.value) == f"MU-SplitFed needs BatchNorm frozen at the {side}{how}"
    joint = optim.sgd(0.1, clip=1.0, clip_scope="joint")
    with pytest.raises(ConfigError) as clipped:
        mu_splitfed(model=quadratic(), client_opt=joint, server_opt=optim.sgd(0.1))
    assert str(clipped.value) == (
        "MU-SplitFed cannot clip with clip_scope='joint': its server-side gradient belongs to no single client; "
        "use clip_scope='part'."
    )


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        ("smoothing", 0, "a number above 0"),
        ("server_steps", 0, "a whole number above 0"),
        ("server_steps", 1.5, "a whole number above 0"),
        ("global_lr", -0.1, "a number from 0 up"),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: Any, wanted: str) -> None:
    with pytest.raises(ConfigError) as refused:
        method(**{option: value})
    assert str(refused.value) == f"{option} is {value!r}, but it must be {wanted}."


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError) as delta_model:
        method(delta_model="final")
    assert str(delta_model.value) == "unknown delta_model 'final' in mu_splitfed; did you mean 'initial'?"
    with pytest.raises(UnknownNameError) as agg:
        method(agg="sample")
    assert str(agg.value) == "unknown agg 'sample'; did you mean 'samples'?"


def test_a_round_of_several_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave steps out of the batching"):
        simulation(method(), samples(), clients_of((12, 8)), batching=Batching(size=4, steps=2))


# -- learning ----------------------------------------------------------------------------------------------------------


def test_mu_splitfed_learns_the_digits() -> None:
    digits = cutlayer.load("digits")
    result = cutlayer.train(
        method(Split(digits_net(), 2), global_lr=1.0),
        digits.train,
        cutlayer.iid(len(digits.train), 20, key=0),
        rounds=40,
        batching=Batching(size=16),
        engine="vmap",
        test=digits.test,
        eval_every=40,
    )
    losses = [record["loss"] for record in result.history]
    assert losses[-1] < 0.5 * losses[0]
    assert result.history[-1]["test_accuracy"] > 0.6
