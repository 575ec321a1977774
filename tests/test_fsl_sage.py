"""Specifies FSL-SAGE: what it equals, how its auxiliary models are made, aligned and sent, and what it refuses."""

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import SEED, agree, clients_of, distance, images, resnet, round_key, run, simulation, walk
from torch import Tensor, nn

from cutlayer import methods, models, optim
from cutlayer.core import keys, tree
from cutlayer.core.batches import Batching
from cutlayer.core.kinds import ACTIVATIONS, AUXILIARY, Kind
from cutlayer.core.meter import Direction, Meter
from cutlayer.core.state import State
from cutlayer.core.values import Held, PerClient
from cutlayer.data.arrays import Arrays
from cutlayer.errors import ConfigError
from cutlayer.methods.fsl_sage import FslSage, SageMemory, fsl_sage
from cutlayer.pieces.auxiliary import Alignment, Auxiliary, Buffer, FirstUnits, Given, appended
from cutlayer.pieces.sampler import shuffled
from cutlayer.planning.devices import Device, Devices
from cutlayer.runs import checkpoint
from cutlayer.split import Split
from cutlayer.split.units import units_of

ENGINES = ("loop", "vmap")
PLAIN, MOMENTUM = optim.sgd(0.1), optim.sgd(0.05, momentum=0.9)
STILL = optim.sgd(lambda round: 0.0)


def sage(net: nn.Module | None = None, cut: int | str = 1, opt: optim.Transform = MOMENTUM, **options: Any) -> FslSage:
    """With few passes of alignment, and a server that may have an optimiser of its own."""
    server_opt = options.pop("server_opt", opt)
    split = Split(net or resnet(), cut)
    return fsl_sage(model=split, client_opt=opt, server_opt=server_opt, **{"align_epochs": 3, **options})


def server_side(cut: int, net: nn.Module | None = None) -> nn.Module:
    """A copy of the units above the cut as a module."""
    return nn.Sequential(*(unit.module for unit in units_of(net or resnet())[cut:]))


def flat(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two layers for the client, and two and a head for the server."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = (nn.Linear(64, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 10))
        return nn.Sequential(nn.Flatten(), *layers).to(dtype)


def text_model() -> nn.Module:
    """Of eight characters, with a layer between the embedding and the head that is eight wide."""
    return models.build("char_transformer", num_classes=10, context=8, width=8, heads=2, layers=2)


# -- Identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "cut", "align_epochs", "server_interval"),
    [("loop", 1, 0, 5), ("loop", 3, 2, 1), ("vmap", 1, 2, 1), ("vmap", 3, 0, 5)],
)
def test_with_the_servers_own_layers_as_auxiliary_model_clients_move_as_in_sfl_v2(
    engine: str, cut: int, align_epochs: int, server_interval: int
) -> None:
    """While the server stands still; what is aligned already stays so, and how often is uploaded does not matter."""
    own = sage(
        cut=cut,
        server_opt=STILL,
        auxiliary=server_side(cut),
        align_epochs=align_epochs,
        server_interval=server_interval,
    )
    v2 = methods.sfl_v2(model=Split(resnet(), cut), client_opt=MOMENTUM, server_opt=STILL)
    found, expected = (run(simulation(method, engine=engine), 2).client.tree for method in (own, v2))
    agree(found, expected)
    assert distance(found.params, Split(resnet(), cut).initial()[0].params) > 1e-2


def test_one_step_with_the_servers_own_layers_is_a_step_of_sfl_v2_on_both_sides() -> None:
    world: dict[str, Any] = {"partition": clients_of((20,)), "data": images(20), "batching": Batching(size=4, steps=1)}
    own = sage(auxiliary=server_side(1), align_epochs=0)
    v2 = methods.sfl_v2(model=Split(resnet(), 1), client_opt=MOMENTUM, server_opt=MOMENTUM)
    found, expected = (run(simulation(method, **world), 1) for method in (own, v2))
    agree(methods.global_model(found), methods.global_model(expected))
    agree(found.report.tree, expected.report.tree)


@pytest.mark.parametrize(("engine", "server_interval", "align_interval"), [("loop", 2, 1), ("vmap", 1, 2)])
def test_three_rounds_in_plain_pytorch(engine: str, server_interval: int, align_interval: int) -> None:
    """Written out with modules and torch.optim: three clients, three, five and two batches, limited buffers."""
    partition, data, net = clients_of((12, 20, 9)), images(), flat()
    client, server = net[:2], net[2:]
    start = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 10)).double()
    aux = {j: deepcopy(start) for j in range(3)}
    align = {j: torch.optim.Adam(a.parameters(), lr=0.01) for j, a in aux.items()}
    buffer: dict[int, tuple[Tensor, Tensor]] = {}
    serve = torch.optim.SGD(server.parameters(), lr=0.05, momentum=0.9)
    for number in range(3):
        own = {j: deepcopy(client) for j in range(3)}
        local = {j: torch.optim.SGD(c.parameters(), lr=0.05, momentum=0.9) for j, c in own.items()}
        batches = walk(partition, number=number)
        for k in range(5):
            active = [j for j in range(3) if k < batches.per_round(j)]
            batch = {j: data.take(batches.samples(j, k)) for j in active}
            z = {j: own[j](batch[j].x) for j in active}
            for j in shuffled(active, round_key(number), k) if k % server_interval == 0 else ():
                serve.zero_grad()
                F.cross_entropy(server(z[j].detach()), batch[j].y).backward()
                serve.step()
                before = buffer.get(j, (z[j][:0].detach(), batch[j].y[:0]))
                new = torch.cat([before[0], z[j].detach()]), torch.cat([before[1], batch[j].y])
                buffer[j] = new[0][-7:], new[1][-7:]
            for j in active if k == 0 and number % align_interval == 0 else ():
                at, y = buffer[j][0].clone().requires_grad_(), buffer[j][1]
                (target,) = torch.autograd.grad(F.cross_entropy(server(at), y), at)
                for _ in range(3):
                    (found,) = torch.autograd.grad(F.cross_entropy(aux[j](at), y), at, create_graph=True)
                    align[j].zero_grad()
                    (found - target).square().sum().backward()
                    align[j].step()
            for j in active:
                local[j].zero_grad()
                F.cross_entropy(aux[j](z[j]), batch[j].y).backward()
                local[j].step()
        shares = [len(index) / 41 for index in partition.clients]
        with torch.no_grad():
            for name, value in client.named_parameters():
                value.copy_(sum(w * own[j].get_parameter(name) for j, w in enumerate(shares)))
    intervals = {"server_interval": server_interval, "align_interval": align_interval}
    method = sage(flat(), 2, auxiliary=start, align_lr=0.01, buffer=7, **intervals)
    state = run(simulation(method, partition=partition, engine=engine), 3)
    agree(method.model.export(methods.global_model(state)), {k: v.detach() for k, v in net.state_dict().items()})
    for j, a in aux.items():
        found = state.memory.auxiliary[j].tree.params
        agree(found, {name: value.detach() for name, value in a.named_parameters()}, 1e-10)


@pytest.mark.parametrize(("norm", "chunk"), [("batch", None), ("group", 2)])
def test_vmap_gives_the_loop_engines_numbers(norm: str, chunk: int | None) -> None:
    def outcome(engine: str) -> tuple[Any, ...]:
        sim = simulation(sage(resnet(norm), server_interval=2, align_interval=2), engine=engine, chunk=chunk)
        state = run(sim, 3)
        return (*(tree_of(part) for part in state[1:]), sim.ledger.content(), sim.backend.memory.content())

    agree(outcome("vmap"), outcome("loop"))


def tree_of(value: Any) -> Any:
    """A state without its places."""
    if isinstance(value, Held):
        return value.tree
    if isinstance(value, SageMemory):
        value = value._asdict()
    return {name: tree_of(v) for name, v in value.items()} if isinstance(value, dict) else value


# -- Alignment ---------------------------------------------------------------------------------------------------------


def to_align(net: nn.Module, cut: int, units: int, opt: optim.Transform) -> tuple[Alignment, Any, Buffer, Tensor]:
    """An alignment with an auxiliary model, a buffer, and the target of the initial server."""
    split = Split(net, cut)
    (lower, upper), few = split.initial(), images(24)
    buffer = Buffer(split.lower(lower, few.x, 0)[0], few.y)
    alignment = Alignment(auxiliary=Auxiliary(model=split, net=FirstUnits(model=split, units=units)), opt=opt)
    part = opt.begin(alignment.auxiliary.net.start(buffer.z, 5), 0)
    with torch.no_grad():
        return alignment, part, buffer, alignment.target(optim.sgd(0.1).begin(upper, 0), buffer, 0)


@pytest.mark.parametrize("units", (0, 1, 2, 3))
def test_full_batch_steps_at_a_small_rate_never_raise_the_distance(units: int) -> None:
    """In a smooth network; the gradients are small, and so a rate of 10 is."""
    alignment, part, buffer, target = to_align(flat(), 2, units, optim.sgd(10.0))
    found = []
    with torch.no_grad():
        for _ in range(30):
            found.append(float(alignment.distance(part, buffer, target, 0)))
            part = alignment.step(part, buffer, target, 0)
    assert all(later <= earlier for earlier, later in pairwise(found))
    assert found[-1] < 0.3 * found[0]
    agree(float(part.progress.loss), sum(found))


def test_the_distance_is_a_sum_over_samples_and_activations() -> None:
    alignment, part, buffer, target = to_align(resnet("group"), 1, 1, PLAIN)
    z = buffer.z.clone().requires_grad_()
    (found,) = torch.autograd.grad(alignment.auxiliary.loss(part, z, buffer.y, 0), z)
    agree(alignment.distance(part, buffer, target, 0).detach(), (found - target).square().sum())


def test_a_sample_that_is_not_finite_is_left_out_of_the_distance() -> None:
    """It counts in the mean loss, as a sample of zeros, and not in the distance."""
    alignment, part, buffer, _ = to_align(resnet("group"), 1, 1, PLAIN)
    server = optim.sgd(0.1).begin(Split(resnet("group"), 1).initial()[1], 0)
    bad = buffer._replace(z=buffer.z.clone())
    bad.z[3, 0, 0, 0] = torch.nan
    with torch.no_grad():
        target, whole = (alignment.target(server, b, 0) for b in (bad, buffer))
        kept = torch.arange(24) != 3
        agree(target[kept], whole[kept])
        assert not target[3].any()
        stepped = alignment.step(part, bad, target, 0)
    assert bool(stepped.progress.ok) and distance(stepped.params, part.params) > 0
    assert all(a.isfinite().all() for a in stepped.params.values())


class Fused(nn.Module):
    """Attention as one kernel, whose own backward pass cannot be differentiated."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_fused_attention_is_aligned_as_well() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), Fused(), nn.Linear(8, 8), nn.Flatten(2), nn.Flatten(), nn.Linear(64, 10))
    data = Arrays(x=images(dtype=torch.float32).x, y=images().y, num_classes=10)
    method = sage(net, 1, auxiliary_units=4)  # 64 features: flat already
    state = run(simulation(method, data), 1)
    begun = FirstUnits(model=method.model, units=4).start(
        torch.zeros(2, 1, 8, 8), keys.fold(round_key(0), "auxiliary", 0)
    )
    aligned = state.memory.auxiliary[0].tree
    assert bool(aligned.progress.ok) and distance(aligned.params, begun.params) > 1e-4


def test_the_buffer_holds_the_newest_samples() -> None:
    z, y = torch.arange(10.0).reshape(10, 1), torch.arange(10)
    buffer = appended(6, z[:4], y[:4])
    assert buffer.y.tolist() == [0, 1, 2, 3]
    assert appended(6, z[4:8], y[4:8], buffer).y.tolist() == [2, 3, 4, 5, 6, 7]
    assert appended(6, z, y).z.flatten().tolist() == [4, 5, 6, 7, 8, 9]


# -- The auxiliary model -----------------------------------------------------------------------------------------------


def test_two_units_of_resnet18_make_an_auxiliary_model_of_2102282_parameters() -> None:
    split = Split(models.build("resnet18", stem="imagenet", num_classes=10), "layer2.1")
    with torch.no_grad():
        begun = FirstUnits(model=split, units=2).start(torch.zeros(2, 128, 4, 4), 0)
    assert sum(a.numel() for values in (begun.params, begun.frozen) for a in values.values()) == 2_102_282
    for name, value in split.initial()[1].params.items():
        assert name.startswith("layer3") == (name in begun.params)
        assert name not in begun.params or torch.equal(begun.params[name], value)
    weight = begun.params["auxiliary.weight"]
    assert weight.shape == (10, 256) and weight.abs().max() <= 1 / 16 and weight.std() > 0.03


@pytest.mark.parametrize(
    ("net", "cut", "units", "x", "width"),
    [
        (resnet(), 1, 2, images(3).x, 4),
        (flat(), 2, 0, images(3).x, 6),
        (text_model(), 1, 1, torch.zeros(3, 8).long(), 8),
    ],
    ids=("image", "flat", "text"),
)
def test_the_last_layer_is_as_wide_as_the_pooled_units(
    net: nn.Module, cut: int, units: int, x: Tensor, width: int
) -> None:
    split = Split(net, cut)
    with torch.no_grad():
        z, _ = split.lower(split.initial()[0], x, 0)
        auxiliary = FirstUnits(model=split, units=units)
        begun = auxiliary.start(z, 7)
        assert begun.params["auxiliary.weight"].shape == (10, width)
        assert auxiliary.scores(begun, z, 0).shape == (3, 10)


def test_texts_are_pooled_at_their_last_place() -> None:
    split = Split(text_model(), 1)
    auxiliary = FirstUnits(model=split, units=1)
    z = torch.randn(2, 8, 8)
    with torch.no_grad():
        begun = auxiliary.start(z, 7)
        h, _ = auxiliary.copied.upper(begun, z, 0)
        w, b = begun.params["auxiliary.weight"], begun.params["auxiliary.bias"]
        agree(auxiliary.scores(begun, z, 0), h[:, -1] @ w.T + b, 1e-6)


def test_the_last_layer_is_drawn_for_each_client_from_the_seed() -> None:
    def weights(seed: int) -> list[Tensor]:
        memory = run(simulation(sage(align_epochs=0), seed=seed), 1).memory.auxiliary
        return [memory[j].tree.params["auxiliary.weight"] for j in range(5)]

    first = weights(SEED)
    agree(weights(SEED), first, 0)
    assert not any(
        torch.equal(a, b) for a, b in zip([*first, *first], [*first[1:], *weights(SEED + 1), *first], strict=False)
    )


# -- What crosses ------------------------------------------------------------------------------------------------------


class Crossings(Meter):
    """Which clients something crossed for, by kind and step."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.step = kind, -1
        self.seen: list[tuple[int, tuple[int, ...]]] = []

    def stepped(self, sizes: Mapping[int, int]) -> None:
        self.step += 1

    def crossed(self, kind: Kind, direction: Direction, value: PerClient) -> None:
        if kind is self.kind and value.ids:
            self.seen.append((self.step, tuple(sorted(value.ids))))


def test_of_sixteen_batches_those_at_0_5_10_and_15_go_up() -> None:
    meter, world = Crossings(ACTIVATIONS), {"partition": clients_of((64,)), "data": images(64)}
    run(simulation(sage(), **world, meters=(meter,)), 1)
    assert meter.seen == [(k, (0,)) for k in (0, 5, 10, 15)]


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_and_round_trips(engine: str) -> None:
    """4 A + 8 a sample up where k = 0 mod q, 4 d_c each way, and 4 d_aux down: uploads + 1 round trips."""
    net, rounds = resnet(dtype=torch.float32), 3
    sim = simulation(sage(net, 3, server_interval=2, align_interval=2), images(dtype=torch.float32), engine=engine)
    run(sim, rounds)
    layers = tree.num_bytes(Split(net, 3).initial()[0].params)
    block = sum(p.numel() for p in net.layer3.parameters())  # type: ignore[union-attr]
    auxiliary = 4 * (block + 10 * 8 + 10)
    uploads = {0: [4, 4], 1: [4, 4, 4], 2: [4], 3: [4, 4, 4], 4: [3]}  # of 3, 5, 2, 5 and 1 batches
    for j, sizes in uploads.items():
        a_round = {
            "down_model": layers,
            "down_settings": 8,
            "up_activations": 4 * 4 * 4 * 4 * sum(sizes),
            "up_labels": 8 * sum(sizes),
            "up_model": layers,
        }
        expected = Counter({name: rounds * size for name, size in a_round.items()})
        assert sim.ledger.per_client[j] == expected + Counter(down_auxiliary=2 * auxiliary)
        assert sim.ledger.trips[j] == rounds * (len(sizes) + 1)
    assert sim.ledger.samples == rounds * 63


@pytest.mark.parametrize("align_interval", (1, 2, 3))
def test_auxiliary_models_are_sent_when_they_have_changed(align_interval: int) -> None:
    meter = Crossings(AUXILIARY)
    run(simulation(sage(align_interval=align_interval), meters=(meter,)), 5)
    assert meter.seen == [(5 * number, (0, 1, 2, 3, 4)) for number in range(5) if number % align_interval == 0]


def test_a_client_that_comes_later_or_has_lost_its_auxiliary_model_is_sent_it() -> None:
    """Two of five clients a round, and alignment in the first round only."""
    meter = Crossings(AUXILIARY)
    sim = simulation(sage(align_interval=100), per_round=2, meters=(meter,), batching=Batching(size=3, steps=1))
    state, known, expected = sim.start(), set[int](), []
    for number in range(7):
        before = set(state.memory.auxiliary)
        if number == 5:
            sim.backend.memory.of("auxiliary").clear()
            known = set()
        state = sim.round(state)
        taking_part = {j for j, sent in state.memory.sent.items() if sent == number}
        assert set(state.memory.auxiliary) - before <= taking_part
        assert not taking_part & known
        known |= taking_part
        expected += [(number, tuple(sorted(taking_part)))] if taking_part else []
    assert meter.seen == expected
    assert len(expected) >= 3 and {number for number, _ in expected} >= {0, 5}
    aligned = {j for j, part in state.memory.auxiliary.items() if part.tree.count}
    assert aligned == set(expected[0][1])


def test_a_client_that_keeps_its_auxiliary_model_computes_as_if_it_had_been_sent_again() -> None:
    def trained(forget: bool) -> State:
        sim = simulation(sage(align_interval=3), per_round=3)
        state = sim.start()
        for _ in range(4):
            if forget:
                sim.backend.memory.of("auxiliary").clear()
            state = sim.round(state)
        return state

    kept, lost = trained(False), trained(True)
    agree(methods.global_model(kept), methods.global_model(lost), 0)


@pytest.mark.parametrize("align_interval", (1, 2))
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(align_interval: int) -> None:
    def fresh() -> Any:
        return simulation(sage(align_interval=align_interval, buffer=9), per_round=3)

    unbroken, stopped, resumed = fresh(), fresh(), fresh()
    whole = run(unbroken, 5)
    content = {"state": run(stopped, 2), "memory": stopped.backend.memory.content()}
    content = checkpoint.unpack(*checkpoint.pack(content))
    resumed.backend.memory.restore(content["memory"])
    state = content["state"]
    for _ in range(3):
        state = resumed.round(state)
    agree(tuple(map(tree_of, state)), tuple(map(tree_of, whole)), 0)
    agree(resumed.backend.memory.content(), unbroken.backend.memory.content(), 0)


def test_alignment_takes_time_and_the_clock_can_count_it(caplog: pytest.LogCaptureFixture) -> None:
    """All of it on the way to each client's first step: so many more passes take so much longer."""
    device = Device(flops=1e6, up=1e6, down=1e6)
    pool = Devices(clients=(device,), server=1e6)
    alone: dict[str, Any] = {"partition": clients_of((20,)), "data": images(20), "devices": pool}

    def seconds(epochs: int) -> float:
        sim = simulation(sage(resnet("group"), align_epochs=epochs), **alone)
        run(sim, 1)
        assert sim.clock is not None
        return sim.clock.now

    few, more, most = (seconds(epochs) for epochs in (1, 2, 4))
    assert few < more
    agree(most - more, 2 * (more - few), 1e-9)
    assert caplog.records == []


# -- Faults and mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server_interval", (1, 5))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_with_values_that_are_not_finite_stops_alone(engine: str, server_interval: int) -> None:
    """Its third batch is bad: with an upload of it the server hears of that, else the client only stands still."""
    data, partition = images(), clients_of()
    x = data.x.clone()
    x[torch.from_numpy(walk(partition).samples(1, 2))] = torch.nan
    sim = simulation(sage(server_interval=server_interval), engine=engine)
    sim.job.data = Arrays(x=x, y=data.y, num_classes=10)
    state = sim.round(sim.start())
    told = {name: float(value) for name, value in state.report.tree._asdict().items()}
    assert told["stopped"] == (1 if server_interval == 1 else 0)
    assert told["batches"] == (13 if server_interval == 1 else 5)
    assert all(a.isfinite().all() for a in tree.tensors((state.client.tree, state.server.tree)))
    sim.job.data = data
    later = sim.round(state)
    assert float(later.report.tree.stopped) == 0
    for j in range(5):  # its buffer holds what came up, which the alignment takes for zeros
        before, after = (s.memory.auxiliary[j].tree for s in (state, later))
        assert all(a.isfinite().all() for a in after.params.values())
        assert distance(after.params, before.params) > 1e-4


def test_the_stopped_clients_last_finite_layers_are_in_the_mean() -> None:
    """Alone, with a bad third batch: the round is its first two steps."""
    alone, data = clients_of((20,)), images(20)
    batches = [walk(alone).samples(0, k) for k in range(5)]
    x = data.x.clone()
    x[torch.from_numpy(batches[2])] = torch.inf
    sim = simulation(sage(opt=PLAIN), data, alone)
    sim.job.data = Arrays(x=x, y=data.y, num_classes=10)
    found = sim.round(sim.start()).client.tree
    two = simulation(sage(opt=PLAIN), data, alone, batching=Batching(size=4, steps=2))
    agree(found, two.round(two.start()).client.tree)


def test_a_run_repeats() -> None:
    dropping = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 10)
    )
    method = sage(dropping.double(), 3, auxiliary_units=2)
    states = [run(simulation(method), 2) for _ in range(2)]
    agree(*(tuple(map(tree_of, state)) for state in states), 0)


@pytest.mark.parametrize("cut", (0, 2, 4, 5))
@pytest.mark.parametrize("engine", ENGINES)
def test_any_cut_will_do(engine: str, cut: int) -> None:
    """Also without a client's layer, without a server's, and where its only unit is the last."""
    method = sage(cut=cut)
    assert isinstance(method.net, FirstUnits) and method.net.units == (1 if cut < 4 else 0)
    state = run(simulation(method, engine=engine), 2)
    assert float(state.report.tree.stopped) == 0
    lower, _ = method.model.initial()
    assert not lower.params or distance(state.client.tree.params, lower.params) > 1e-2


def test_a_u_shape_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        fsl_sage(model=Split(resnet(), 1, head=4), client_opt=PLAIN, server_opt=PLAIN)
    assert str(caught.value) == "FSL-SAGE needs the labels and the last layers at the server; leave the head out"


def test_a_joint_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^FSL-SAGE cannot clip with clip_scope='joint'"):
        sage(opt=optim.sgd(0.1, clip=1.0, clip_scope="joint"))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"server_interval": 0}, "server_interval is 0, but it must be a whole number from 1 up."),
        ({"align_interval": 0.5}, "align_interval is 0.5, but it must be a whole number from 1 up."),
        ({"align_epochs": -1}, "align_epochs is -1, but it must be a whole number from 0 up."),
        ({"buffer": True}, "buffer is True, but it must be a whole number from 1 up."),
        ({"align_lr": 0}, "lr is 0, but it must be a number above 0."),
        (
            {"auxiliary_units": 4},
            "auxiliary_units is 4, but it must be a whole number from 0 to 3, the server's units but its last.",
        ),
        (
            {"auxiliary": "layer1"},
            "auxiliary is a str; give a Module, from the activations at the cut to scores of the classes",
        ),
        (
            {"auxiliary": nn.Linear(2, 10), "auxiliary_units": 0},
            "auxiliary_units says how many of the server's units to copy, but auxiliary is a model of your own; leave "
            "one of them out",
        ),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sage(**options)
    assert str(caught.value) == told


def test_shapes_that_an_auxiliary_model_cannot_be_made_for() -> None:
    split = Split(nn.Sequential(nn.Identity(), nn.Identity(), nn.Linear(4, 4)), 1)
    auxiliary = FirstUnits(model=split, units=1)
    with pytest.raises(ConfigError) as caught:
        auxiliary.start(torch.zeros(2, 3, 4), 0)
    assert str(caught.value) == (
        "the auxiliary model ends in a row of scores for each sample, but this model's outputs have the shape (2, 3, "
        "4); give an auxiliary model of your own, in Python: fsl_sage(..., auxiliary=module)"
    )
    split = Split(nn.Sequential(nn.Identity(), nn.Identity(), nn.Flatten(), nn.Linear(24, 4)), 1)
    with pytest.raises(ConfigError) as caught:
        FirstUnits(model=split, units=1).start(torch.zeros(2, 1, 2, 3, 4), 0)
    assert str(caught.value) == (
        "the auxiliary model cannot pool activations of shape (2, 1, 2, 3, 4): it knows (batch, width), (batch, "
        "places, width) and (batch, channels, height, width); give an auxiliary model of your own, in Python: "
        "fsl_sage(..., auxiliary=module)"
    )


@pytest.mark.parametrize(
    ("own", "told"),
    [
        (
            nn.Linear(7, 10),
            "the auxiliary model does not fit the activations at the cut, which have the shape (4, 6): mat1 and mat2 "
            "shapes cannot be multiplied (4x6 and 7x10); give a module from those to scores of the classes",
        ),
        (
            nn.Linear(6, 3),
            "the auxiliary model gives scores of shape (4, 3) for activations of shape (4, 6) at the cut, but the "
            "model's outputs have the shape (4, 10); give a score for each class",
        ),
    ],
    ids=("cut", "classes"),
)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_of_ones_own_that_does_not_fit(engine: str, own: nn.Module, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(simulation(sage(flat(), 2, auxiliary=own.double()), engine=engine), 1)
    assert str(caught.value) == told


def test_a_module_of_ones_own_starts_every_client() -> None:
    own = server_side(1)
    assert isinstance(sage(auxiliary=own).net, Given)
    state = run(simulation(sage(auxiliary=own, align_epochs=0)), 1)
    values = {name: value.detach() for name, value in own.named_parameters()}
    for j in range(5):
        agree(state.memory.auxiliary[j].tree.params, values, 0)
