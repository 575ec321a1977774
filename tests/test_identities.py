"""Specifies which methods are the same method in disguise, and small examples whose numbers were worked out by hand."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    NUM_UNITS,
    agree,
    clients_of,
    distance,
    images,
    interleaved,
    relayed,
    resnet,
    run,
    sgd_by_hand,
    simulation,
    trained,
    walk,
)
from torch import Tensor, nn

from cutlayer import methods, models, optim
from cutlayer.core.batches import Batching
from cutlayer.core.kinds import GRADIENTS, Kind
from cutlayer.core.meter import Direction, Meter
from cutlayer.core.state import Model
from cutlayer.core.values import PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition
from cutlayer.methods.fedavg import FedAvg
from cutlayer.methods.splitfed import SplitFed
from cutlayer.pieces.outer import HeavyBall, Replace
from cutlayer.split import Split

OPTIMISERS = {
    "sgd": optim.sgd(0.1, weight_decay=1e-2),
    "momentum": optim.sgd(0.05, momentum=0.9),
    "nesterov": optim.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": optim.adam(1e-3),
    "adamw": optim.adamw(1e-3, weight_decay=0.1),
}
PLAIN, MOMENTUM = optim.sgd(0.1), optim.sgd(0.05, momentum=0.9)
ONE_STEP = Batching(size=4, steps=1)


def result(
    name: str,
    opt: optim.Transform,
    cut: int = 1,
    head: int | None = None,
    *,
    net: nn.Module | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Trained values; options of the simulation beside the method's own."""
    known = {"partition", "rounds", "batching", "data"}
    world = {key: options.pop(key) for key in known & set(options)}
    return trained(methods.build(name, Split(net or resnet(), cut, head=head), opt, opt, **options), **world)


# -- SFL-V1 is FedAvg --------------------------------------------------------------------------------------------------


@cache
def fedavg(opt: str) -> dict[str, Tensor]:
    return result("fedavg", OPTIMISERS[opt])


@pytest.mark.parametrize(
    ("opt", "cut"),
    [*(("momentum", cut) for cut in range(NUM_UNITS + 1)), *((o, 2) for o in OPTIMISERS if o != "momentum")],
)
def test_sfl_v1_is_fedavg_at_every_cut(opt: str, cut: int) -> None:
    agree(result("sfl_v1", OPTIMISERS[opt], cut), fedavg(opt))


@pytest.mark.parametrize("head", (None, 4))
def test_clipping_is_fedavgs_only_with_the_joint_norm(head: int | None) -> None:
    whole = result("fedavg", optim.sgd(0.1, clip=0.5))
    assert distance(whole, result("fedavg", PLAIN)) > 1e-2  # the clip is felt
    agree(result("sfl_v1", optim.sgd(0.1, clip=0.5, clip_scope="joint"), head=head), whole)
    assert distance(result("sfl_v1", optim.sgd(0.1, clip=0.5, clip_scope="part"), head=head), whole) > 1e-3


# -- Split learning is centralised training ----------------------------------------------------------------------------


@cache
def centralised(clip: float = torch.inf) -> dict[str, Tensor]:
    return sgd_by_hand(resnet(), images(), relayed(clients_of(), rounds=2), lr=0.1, clip=clip)


@pytest.mark.parametrize("cut", range(NUM_UNITS + 1))
def test_sl_is_centralised_sgd_at_every_cut(cut: int) -> None:
    agree(result("sl", PLAIN, cut), centralised())


def reusing() -> nn.Sequential:
    """A sequence with an activation at three places, and a linear layer and a normalisation at two."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        act, linear, norm = nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8)
        layers = nn.Flatten(), nn.Linear(64, 8), act, linear, norm, act, linear, norm, act, nn.Linear(8, 10)
        return nn.Sequential(*layers).double()


@pytest.mark.parametrize("cut", (0, 1, 2, 3, 8, 9, 10))  # all but those between two uses of the same values
def test_a_module_that_is_used_twice_trains_as_in_plain_sgd(cut: int) -> None:
    plain = sgd_by_hand(reusing(), images(), relayed(clients_of(), rounds=2), lr=0.1)
    agree(result("sl", PLAIN, cut, net=reusing()), plain)


def test_sl_with_the_joint_norm_is_centralised_sgd_with_clipping() -> None:
    agree(result("sl", optim.sgd(0.1, clip=0.5, clip_scope="joint")), centralised(clip=0.5))


def test_the_order_of_the_clients_matters_to_sl() -> None:
    assert distance(result("sl", PLAIN, order="fixed"), centralised()) > 1e-3


# -- The U-shape -------------------------------------------------------------------------------------------------------


def with_plain_end() -> nn.Module:
    """Units conv1, conv2, fc1, head and one without parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = models.build("cnn", width=2, norm="batch")
        return nn.Sequential(*layers.children(), nn.Tanh()).double()


EVERY_U = [(cut, head) for cut in range(NUM_UNITS + 1) for head in range(cut, NUM_UNITS + 1)]


@pytest.mark.parametrize(
    ("name", "opt", "cut", "head"),
    [
        *(("sl", PLAIN, *u) for u in EVERY_U),
        *(("sfl_v1", MOMENTUM, *u) for u in ((0, 0), (0, 5), (1, 4), (2, 2), (5, 5))),
    ],
)
def test_where_a_layer_is_computed_does_not_matter_to_sl_and_sfl_v1(
    name: str, opt: optim.Transform, cut: int, head: int
) -> None:
    agree(result(name, opt, cut, head), result(name, opt, cut))


@pytest.mark.parametrize(("cut", "head"), [(1, 4), (2, 4), (1, 5), (3, 5)])
@pytest.mark.parametrize("name", ("sl", "sfl_v1", "sfl_v2", "mergesfl"))
def test_a_head_without_parameters_only_moves_the_loss_to_the_client(name: str, cut: int, head: int) -> None:
    net = with_plain_end()
    agree(result(name, MOMENTUM, cut, head, net=net), result(name, MOMENTUM, cut, net=net))


@pytest.mark.parametrize(("cut", "head"), [(1, 4), (2, 3)])
@pytest.mark.parametrize("name", ("sfl_v2", "mergesfl"))
def test_a_head_with_parameters_is_each_clients_own(name: str, cut: int, head: int) -> None:
    """One server-side model for all becomes one a client, averaged: another method, unless there is one client."""
    assert distance(result(name, PLAIN, cut, head), result(name, PLAIN, cut)) > 1e-3
    alone = {"partition": clients_of((20,)), "data": images(20)}
    agree(result(name, PLAIN, cut, head, **alone), result(name, PLAIN, cut, **alone))


# -- MergeSFL is a big batch -------------------------------------------------------------------------------------------

REGULATED = {"seconds_per_sample": (1.0, 2.0, 1.0, 0.5, 4.0), "largest_batch": 8}
MERGED = {  # sizes of the clients' batches
    "equal": ((20, 12, 8), {}, (4, 4, 4)),
    "a small client": ((12, 20, 9, 20, 3), {}, (4, 4, 4, 4, 3)),
    "regulated": ((12, 20, 9, 20, 3), REGULATED, (4, 2, 4, 8, 1)),
}


def first_batches(partition: Partition, sizes: Sequence[int]) -> list[np.ndarray]:
    """The first batch of every client, of its own size."""
    batches = walk(partition)
    batches.sizes = dict(enumerate(sizes))
    return [batches.samples(j, 0) for j in range(len(partition))]


@pytest.mark.parametrize(
    ("case", "cut", "head"),
    [
        *(("regulated", cut, head) for cut, head in [*((cut, None) for cut in range(NUM_UNITS + 1)), (1, 3), (2, 4)]),
        *((case, 2, None) for case in ("equal", "a small client")),
    ],
)
def test_one_step_of_mergesfl_is_a_step_on_the_merged_batch(case: str, cut: int, head: int | None) -> None:
    held, options, sizes = MERGED[case]
    partition, net = clients_of(held), resnet("group")
    merged = np.concatenate(first_batches(partition, sizes))
    world = {"partition": partition, "batching": ONE_STEP, "rounds": 1}
    agree(
        result("mergesfl", PLAIN, cut, head, net=net, **world, **options), sgd_by_hand(net, images(), [merged], lr=0.1)
    )


class CutGradients(Meter):
    """Keeps what each client is sent as the gradient at its cut."""

    def __init__(self) -> None:
        self.received: dict[int, Tensor] = {}

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        if (kind, direction) == (GRADIENTS, "down"):
            self.received = {j: value.at(j) for j in value.ids}


@pytest.mark.parametrize("case", MERGED)
def test_mergesfl_sends_each_client_the_gradient_of_its_own_batch_mean(case: str) -> None:
    """Which is b / b_j times its slice of the merged gradient."""
    held, options, sizes = MERGED[case]
    partition, net, meter = clients_of(held), resnet("group"), CutGradients()
    split = Split(net, 2)
    method = methods.build("mergesfl", split, PLAIN, PLAIN, **options)
    run(simulation(method, partition=partition, batching=ONE_STEP, meters=(meter,)), rounds=1)

    lower, upper = split.initial()
    batches = [images().take(samples) for samples in first_batches(partition, sizes)]
    z = [split.lower(lower, batch.x)[0].detach().requires_grad_() for batch in batches]
    y = [batch.y for batch in batches]
    total = F.cross_entropy(split.upper(upper, torch.cat(z))[0], torch.cat(y))
    slices = torch.autograd.grad(total, z)
    for j, (z_j, y_j) in enumerate(zip(z, y, strict=True)):
        (own,) = torch.autograd.grad(F.cross_entropy(split.upper(upper, z_j)[0], y_j), z_j)
        agree(meter.received[j], own)
        agree(slices[j], own * sizes[j] / sum(sizes))


def test_equal_batches_give_mergesfl_the_mean_of_the_clients_server_side_gradients() -> None:
    """So its server moves as the mean of SFL-V1's copies of it."""
    world = {"partition": clients_of((12, 12, 12)), "batching": ONE_STEP, "rounds": 1}
    agree(*(result(name, PLAIN, 2, net=resnet("group"), **world) for name in ("mergesfl", "sfl_v1")))


@pytest.mark.parametrize(("agg", "share"), [("batch", 2 / 3), ("uniform", 1 / 2)])
def test_mergesfls_client_models_weigh_as_their_batches_or_all_the_same(agg: str, share: float) -> None:
    """Two clients with batches of 4 and 2, one step each."""
    world = {"partition": clients_of((4, 2)), "batching": ONE_STEP, "rounds": 1}
    found = result("mergesfl", PLAIN, 2, net=resnet("group"), agg=agg, **world)
    first, second = (sgd_by_hand(resnet("group"), images(), [np.arange(*span)], lr=0.1) for span in ((0, 4), (4, 6)))
    for name in Split(resnet(), 2).initial()[0].params:
        agree(found[name], share * first[name] + (1 - share) * second[name])


# -- SFL-V2 between its limits -----------------------------------------------------------------------------------------


def test_sfl_v2_with_an_empty_client_is_centralised_sgd_with_momentum() -> None:
    batches = interleaved(clients_of(), rounds=2)
    agree(result("sfl_v2", MOMENTUM, cut=0), sgd_by_hand(resnet(), images(), batches, lr=0.05, momentum=0.9))


def test_sfl_v2_client_by_client_with_an_empty_client_visits_the_batches_as_sl_does() -> None:
    agree(result("sfl_v2", PLAIN, cut=0, interleave="client", order="fixed"), result("sl", PLAIN, order="fixed"))


@pytest.mark.parametrize("opt", OPTIMISERS)
@pytest.mark.parametrize("interleave", ("step", "client"))
def test_sfl_v2_with_all_layers_at_the_client_is_fedavg(interleave: str, opt: str) -> None:
    agree(result("sfl_v2", OPTIMISERS[opt], NUM_UNITS, interleave=interleave), fedavg(opt))


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedavg", {}), ("sfl_v1", {}), ("sfl_v2", {"server_opt_reset": "round"})],
    ids=("fedavg", "sfl_v1", "sfl_v2"),
)
def test_with_one_client_methods_that_start_over_are_local_sgd_with_momentum(
    name: str, options: dict[str, Any]
) -> None:
    alone, data, net = clients_of((20,)), images(20), resnet()
    for number in range(2):  # a new optimiser each round
        batches = [walk(alone, number=number).samples(0, step) for step in range(5)]
        expected = sgd_by_hand(net, data, batches, lr=0.05, momentum=0.9)
    agree(result(name, MOMENTUM, partition=alone, data=data, **options), expected)


def test_mergesfl_with_one_client_is_local_sgd_in_its_first_round() -> None:
    """Later rounds differ: the server's momentum lives on, the client's starts over."""
    alone, data, net = clients_of((20,)), images(20), resnet()
    batches = [walk(alone).samples(0, step) for step in range(5)]
    expected = sgd_by_hand(net, data, batches, lr=0.05, momentum=0.9)
    agree(result("mergesfl", MOMENTUM, partition=alone, data=data, rounds=1), expected)


def test_the_shared_servers_momentum_lives_on_between_rounds_unless_told_otherwise() -> None:
    alone, data = clients_of((20,)), images(20)
    kept, reset = (
        result("sfl_v2", MOMENTUM, 0, partition=alone, data=data, server_opt_reset=when) for when in ("never", "round")
    )
    agree(kept, sgd_by_hand(resnet(), data, interleaved(alone, rounds=2), lr=0.05, momentum=0.9))
    assert distance(kept, reset) > 1e-3


def test_adam_that_starts_over_at_every_step_is_a_sign_step() -> None:
    """Its first step is η g / (|g| + ε): never longer than η."""
    lr, eps, net = 1e-2, 1e-8, resnet()
    alone, data = clients_of((20,)), images(20)
    opt = optim.adam(lr, eps=eps)
    world = {"partition": alone, "data": data, "batching": ONE_STEP, "server_opt_reset": "step"}
    first, second = (result("sfl_v2", opt, cut=0, rounds=rounds, **world) for rounds in (1, 2))
    batch = data.take(walk(alone, ONE_STEP).samples(0, 0))
    F.cross_entropy(net(batch.x), batch.y).backward()
    for name, value in net.named_parameters():
        agree(first[name], value.detach() - lr * value.grad / (value.grad.abs() + eps), 1e-10)
        assert (second[name] - first[name]).abs().max() <= lr


# -- FedAvg ------------------------------------------------------------------------------------------------------------


def test_one_plain_step_of_fedavg_is_a_step_on_all_batches_at_once() -> None:
    partition, net = clients_of((4, 4, 3, 2)), resnet("group")  # all of a client's data is one batch
    found = result("fedavg", PLAIN, net=net, partition=partition, rounds=1)
    agree(found, sgd_by_hand(net, images(), [np.arange(13)], lr=0.1))


def test_identical_clients_train_as_one() -> None:
    epochs = Batching(size=4, epochs=3)
    many, one = Partition((np.arange(4),) * 3), Partition((np.arange(4),))
    agree(*(result("fedavg", MOMENTUM, partition=clients, batching=epochs) for clients in (many, one)))


# -- The server side between steps and rounds --------------------------------------------------------------------------


def test_averaging_at_every_step_leaves_the_server_without_momentum() -> None:
    with_momentum, without = (
        trained(methods.build("sfl_v1", Split(resnet(), 1), MOMENTUM, optim.sgd(0.05, momentum=beta), sync="step"))
        for beta in (0.9, 0.0)
    )
    agree(with_momentum, without)


def test_one_epoch_averaged_at_its_end_is_a_round() -> None:
    agree(result("sfl_v1", MOMENTUM, sync="epoch"), result("sfl_v1", MOMENTUM))


@pytest.mark.parametrize("beta", (0.0, 0.5))
@pytest.mark.parametrize("name", ("fedavg", "sfl_v1"))
def test_global_momentum_of_zero_is_none(name: str, beta: float) -> None:
    def build(outer: HeavyBall | Replace) -> FedAvg | SplitFed:
        if name == "fedavg":
            return FedAvg(model=Split(resnet(), 1), opt=MOMENTUM, outer=outer)
        return SplitFed(model=Split(resnet(), 1), client_opt=MOMENTUM, server_opt=MOMENTUM, outer=outer)

    moved = distance(trained(build(HeavyBall(beta))), trained(build(Replace())))
    assert moved < 1e-12 if beta == 0 else moved > 1e-3


def test_two_rounds_of_global_momentum_by_hand() -> None:
    """Δ = 1 twice with β = 0.5: m = 1, then 1.5; buffers are the mean's, untouched by momentum."""
    rule, old = HeavyBall(0.5), Model({"w": torch.tensor(10.0)}, {}, {"seen": torch.tensor(0)})
    memory = rule.start(old)
    for number, expected in ((1, 9.0), (2, 7.5)):
        mean = Model({"w": old.params["w"] - 1}, {}, {"seen": torch.tensor(number)})
        memory, old = rule(memory, old, mean, lr=0.1)
        assert (float(old.params["w"]), int(old.buffers["seen"])) == (expected, number)


# -- Numbers worked out by hand ----------------------------------------------------------------------------------------


def first_output(out: Tensor, y: Tensor) -> Tensor:
    return out.mean()


class Product(nn.Sequential):
    """The output is b a x, so the gradients of its mean are b x̄ for a and a x̄ for b; a = 2 and b = 1 at first."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        self.double()
        for layer, value in zip(self, (2.0, 1.0), strict=True):
            nn.init.constant_(layer.weight, value)


# Two clients with x = 1 and x = 3 and as many samples, and η = 0.5. After the first step, alone, they hold
#   (a, b) = (2 - 1/2, 1 - 1) = (1.5, 0)  and  (2 - 3/2, 1 - 3) = (0.5, -2).
BY_HAND = [
    ("fedavg", {}, 1, (1.0, -1.0)),  # their mean
    ("sfl_v1", {}, 1, (1.0, -1.0)),
    # The second steps: a = 1.5 - 0 and 0.5 + 3, b = 0 - 0.75 and -2 - 0.75.
    ("fedavg", {}, 2, (2.5, -1.75)),
    ("sfl_v1", {}, 2, (2.5, -1.75)),
    # Both go on from b = -1: a = 1.5 + 0.5 and 0.5 + 1.5, b = -1 - 0.75 twice.
    ("sfl_v1", {"sync": "step"}, 2, (2.0, -1.75)),
    ("sfl_v1", {"sync": "epoch"}, 2, (2.0, -1.75)),
    # The first client leaves b = 0, so the second gets no gradient: a = 1.5 and 2, b = 0 - 0.5 · 2 · 3.
    ("sfl_v2", {"order": "fixed"}, 1, (1.75, -3.0)),
    # The second client starts from (1.5, 0): b = -0.5 · 1.5 · 3.
    ("sl", {"order": "fixed"}, 1, (1.5, -2.25)),
    # The merged x̄ is 2: b = 1 - 0.5 · 2 · 2; a as alone.
    ("mergesfl", {}, 1, (1.0, -1.0)),
    # Second step from b = -1 and a = 1.5 and 0.5: b = -1 - 0.5 (1.5 + 1.5) / 2, a = 1.5 + 0.5 and 0.5 + 1.5.
    ("mergesfl", {}, 2, (2.0, -1.75)),
]


@pytest.mark.parametrize(("name", "options", "epochs", "expected"), BY_HAND)
@pytest.mark.parametrize("engine", ("loop", "vmap"))
def test_numbers_by_hand(
    engine: str, name: str, options: dict[str, Any], epochs: int, expected: tuple[float, float]
) -> None:
    data = Arrays(x=torch.tensor([[1.0], [1.0], [3.0], [3.0]], dtype=torch.float64), y=torch.zeros(4))
    split = Split(Product(), 1, loss=first_output)
    method = methods.build(name, split, optim.sgd(0.5), optim.sgd(0.5), **options)
    batching = Batching(size=2, epochs=epochs)
    found = trained(method, data, clients_of((2, 2)), batching=batching, rounds=1, engine=engine)
    assert (float(found["0.weight"]), float(found["1.weight"])) == expected
