"""Specifies simulated time: each method's round in closed form, and how time travels with values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import SIZES, agree, clients_of, images, resnet, round_key, run, simulation, trained
from torch import Tensor, nn

from cutlayer import methods, models, optim
from cutlayer.core import tree
from cutlayer.core.batches import Batching
from cutlayer.core.method import Method
from cutlayer.core.values import Held
from cutlayer.data.arrays import Arrays
from cutlayer.data.partition import Partition, dirichlet
from cutlayer.errors import ConfigError
from cutlayer.pieces.sampler import Draw, shuffled, uniform
from cutlayer.planning.devices import REFERENCE_FLOPS, Device, Devices, Pool
from cutlayer.planning.profile import profile
from cutlayer.runs.simulation import Simulation
from cutlayer.split import Split

OPT = optim.sgd(0.1, momentum=0.9)
JOINT = optim.sgd(0.1, clip=0.5, clip_scope="joint")
ROUNDS = 2
IMAGE = (1, 8, 8)
WORD = 32  # bits
Plan = dict[int, list[int]]  # the sizes of each client's batches in a round
BATCHES: Plan = {0: [4] * 3, 1: [4] * 5, 2: [4] * 2, 3: [4] * 5, 4: [3]}  # of SIZES, in batches of 4


# -- worlds ----------------------------------------------------------------------------------------------------


def cnn() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return models.build("cnn", width=2)


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": partial(resnet, dtype=torch.float32), "cnn": cnn}

EQUAL = (Device(3e5, 5e4, 5e4),) * 5
CROSSED = tuple(Device(1e5 * 3**k, 1e6 / 3**k, 7e5 / 3**k) for k in range(5))  # the slower computer, the faster link


def mixed(seed: int) -> tuple[Device, ...]:
    random = np.random.default_rng(seed)
    return tuple(Device(*np.exp(random.normal((12.6, 11.0, 11.5), 0.8)).tolist()) for _ in range(5))


def scaled(device: Device, factor: float) -> Device:
    return Device(flops=factor * device.flops, up=factor * device.up, down=factor * device.down)


WORLDS = {"equal": EQUAL, "crossed": CROSSED, "mixed": mixed(0)}
NAMES = ("sl", "sfl_v1", "sfl_v2", "mergesfl", "smofi", "fedavg")


def devices(clients: Sequence[Device], **options: Any) -> Devices:
    return Devices(clients=tuple(clients), server=2e6, **options)


def timed(method: Method, clients: Sequence[Device] | Devices, sizes: Sequence[int] = SIZES, **options: Any) -> Any:
    given = clients if isinstance(clients, Devices) else devices(clients)
    return simulation(method, images(sum(sizes), torch.float32), clients_of(sizes), devices=given, **options)


def durations(sim: Simulation, rounds: int = ROUNDS) -> list[float]:
    """Seconds of each round."""
    state, times = sim.start(), [0.0]
    for _ in range(rounds):
        state = sim.round(state)
        times.append(sim.clock.now)
    return np.diff(times).tolist()


def build(name: str, net: str = "cnn", cut: int = 2, head: int | None = None, opt: Any = OPT, **options: Any) -> Method:
    return methods.build(name, Split(NETS[net](), cut, head=head), opt, opt, **options)


def close(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


# -- closed forms ------------------------------------------------------------------------------------------------


class Costs:
    """Seconds of one sample of each client, from the profile's multiply-adds, O(L) and A(L)."""

    def __init__(self, net: nn.Module, cut: int, given: Devices, shape: tuple[int, ...] = IMAGE) -> None:
        table = profile(net, shape)
        bits, flops = WORD * table.activations[cut], 2 * table.macs
        self.whole = [3 * flops / d.flops for d in given.clients]
        self.device = [seconds * table.share(cut) for seconds in self.whole]  # forward, and backward as two of them
        self.up, self.down = [bits / d.up for d in given.clients], [bits / d.down for d in given.clients]
        self.server = 3 * flops / given.server * (1 - table.share(cut))
        self.sync = [WORD * table.params * (1 / d.up + 1 / d.down) for d in given.clients]  # of the whole model
        self.sync_below = [s * table.cumulative_params[cut] / table.params for s in self.sync]

    def own(self, j: int) -> float:
        """t^d + t^comm."""
        return self.device[j] + self.up[j] + self.down[j]

    def all(self, j: int) -> float:
        """t^d + t^s + t^comm."""
        return self.own(j) + self.server


def of(net: str, cut: int, clients: Sequence[Device] | Devices) -> Costs:
    return Costs(NETS[net](), cut, clients if isinstance(clients, Devices) else devices(clients))


def by_step(plan: Plan) -> Iterator[dict[int, int]]:
    """The sizes of the active clients' batches, step by step."""
    for step in range(max(map(len, plan.values()))):
        yield {j: sizes[step] for j, sizes in plan.items() if step < len(sizes)}


def stepwise(costs: Costs, plan: Plan) -> float:
    """Every step waits for the slowest."""
    return sum(max(b * costs.all(j) for j, b in active.items()) for active in by_step(plan))


def alone(costs: Costs, plan: Plan) -> float:
    """Nobody waits before the end."""
    return max(sum(sizes) * costs.all(j) for j, sizes in plan.items())


def in_turn(costs: Costs, plan: Plan) -> float:
    return sum(sum(sizes) * costs.all(j) for j, sizes in plan.items())


def one_server(costs: Costs, plan: Plan) -> float:
    """At every step the slowest client, and then the server with all batches one after another, or merged."""
    return sum(
        max(b * costs.own(j) for j, b in active.items()) + sum(active.values()) * costs.server
        for active in by_step(plan)
    )


def one_server_event_by_event(costs: Costs, plan: Plan) -> float:
    """The same story told exactly: the wait is between the way up and the way down, not between steps."""
    free = dict.fromkeys(plan, 0.0)
    for active in by_step(plan):
        there = max(free[j] + b * (costs.device[j] / 3 + costs.up[j]) for j, b in active.items())
        answered = there + sum(active.values()) * costs.server
        free |= {j: answered + b * (costs.down[j] + costs.device[j] * 2 / 3) for j, b in active.items()}
    return max(free.values())


def longest(costs: Costs, plan: Plan) -> float:
    return max(max(sizes) * costs.all(j) for j, sizes in plan.items())


CUTS = [("resnet", 2), ("cnn", 1), ("cnn", 2)]
every_world = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
every_cut = pytest.mark.parametrize(("net", "cut"), CUTS)
BARRIERS = [("smofi", {}, stepwise), ("sfl_v1", {"sync": "step"}, stepwise), ("sfl_v1", {}, alone), ("sl", {}, in_turn)]


@every_world
@every_cut
@pytest.mark.parametrize(("name", "options", "form"), BARRIERS, ids=("smofi", "v1 step", "v1 round", "sl"))
def test_a_round_takes_as_long_as_its_barriers_say(
    name: str, options: Any, form: Callable[[Costs, Plan], float], net: str, cut: int, world: Sequence[Device]
) -> None:
    sim = timed(build(name, net, cut, **options), world)
    assert durations(sim) == [close(form(of(net, cut, world), BATCHES))] * ROUNDS


@every_world
def test_sfl_v1_by_epoch_takes_the_slowest_of_every_epoch(world: Sequence[Device]) -> None:
    """Every epoch has the same steps, so that is max_j T_j t_j, as without barriers."""
    costs = of("cnn", 2, world)
    sim = timed(build("sfl_v1", sync="epoch"), world, batching=Batching(size=4, epochs=3))
    assert durations(sim) == [close(3 * alone(costs, BATCHES))] * ROUNDS
    fixed = timed(build("sfl_v1", sync="epoch"), world, batching=Batching(size=4, steps=4))
    epochs = [  # passes of 3, 5, 2, 5 and 1 steps, until each client has had 4
        {0: [4] * 3, 1: [4] * 4, 2: [4] * 2, 3: [4] * 4, 4: [3]},
        {0: [4], 2: [4] * 2, 4: [3]},
        {4: [3]},
        {4: [3]},
    ]
    assert durations(fixed, 1) == [close(sum(alone(costs, plan) for plan in epochs))]


OTHER_SIZES = (9, 2, 30, 17, 6)
OTHER_BATCHES: Plan = {0: [6, 3], 1: [2], 2: [6] * 5, 3: [6, 6, 5], 4: [6]}  # the last ones of a pass are smaller


@pytest.mark.parametrize(("name", "options", "form"), BARRIERS, ids=("smofi", "v1 step", "v1 round", "sl"))
def test_smaller_last_batches_take_less(name: str, options: Any, form: Callable[[Costs, Plan], float]) -> None:
    sim = timed(build(name, **options), CROSSED, OTHER_SIZES, batching=Batching(size=6, drop_last=False))
    assert durations(sim, 1) == [close(form(of("cnn", 2, CROSSED), OTHER_BATCHES))]


@every_world
@every_cut
@pytest.mark.parametrize("name", ("sfl_v2", "mergesfl"))
def test_one_server_part_adds_its_batches_to_the_slowest_client_of_every_step(
    name: str, net: str, cut: int, world: Sequence[Device]
) -> None:
    costs = of(net, cut, world)
    times = durations(timed(build(name, net, cut), world))
    assert times == [close(one_server_event_by_event(costs, BATCHES))] * ROUNDS
    assert abs(times[0] - one_server(costs, BATCHES)) < longest(costs, BATCHES)
    if world is EQUAL:
        assert times[0] == close(one_server(costs, BATCHES))


@pytest.mark.parametrize("world", (EQUAL, CROSSED, mixed(2)))
def test_mergesfl_with_regulated_batches(world: Sequence[Device]) -> None:
    plan: Plan = {0: [8] * 4, 1: [4] * 4, 2: [8] * 4, 3: [2] * 4, 4: [3] * 4}  # int(8 / seconds)
    method = build("mergesfl", seconds_per_sample=(1.0, 2.0, 1.0, 4.0, 2.5))
    sizes, costs = (16, 20, 9, 20, 8), of("cnn", 2, world)
    (time,) = durations(timed(method, world, sizes, batching=Batching(size=8, steps=4)), 1)
    assert time == close(one_server_event_by_event(costs, plan))
    assert abs(time - one_server(costs, plan)) < longest(costs, plan)


def test_sfl_v2_client_by_client_waits_for_the_server_only() -> None:
    """The next client's first batch is there long before the server is free for it."""
    costs, server, free = of("cnn", 2, CROSSED), 0.0, dict.fromkeys(BATCHES, 0.0)
    for j in shuffled(range(5), round_key(0), 0):
        for b in BATCHES[j]:
            server = max(server, free[j] + b * (costs.device[j] / 3 + costs.up[j])) + b * costs.server
            free[j] = server + b * (costs.down[j] + costs.device[j] * 2 / 3)
    sim = timed(build("sfl_v2", interleave="client"), CROSSED)
    assert durations(sim, 1) == [close(max(free.values()))]


@every_world
@pytest.mark.parametrize("sync", (False, True))
def test_fedavg_takes_the_slowest_client_with_or_without_its_model_transfers(
    sync: bool, world: Sequence[Device]
) -> None:
    given = devices(world, model_sync=sync)
    costs = of("resnet", 1, given)
    expected = max(sum(sizes) * costs.whole[j] + (costs.sync[j] if sync else 0.0) for j, sizes in BATCHES.items())
    assert durations(timed(build("fedavg", "resnet", 1), given)) == [close(expected)] * ROUNDS


def test_fednag_transfers_its_momenta_beside_the_model() -> None:
    given = devices(CROSSED, model_sync=True)
    costs = of("cnn", 2, given)
    expected = max(sum(sizes) * costs.whole[j] + 2 * costs.sync[j] for j, sizes in BATCHES.items())
    assert durations(timed(build("fednag"), given)) == [close(expected)] * ROUNDS


def test_with_model_sync_a_split_client_transfers_its_own_layers_only() -> None:
    given = devices(CROSSED, model_sync=True)
    costs = of("cnn", 2, given)
    expected = max(sum(sizes) * costs.all(j) + costs.sync_below[j] for j, sizes in BATCHES.items())
    assert durations(timed(build("sfl_v1"), given)) == [close(expected)] * ROUNDS


@pytest.mark.parametrize("world", (EQUAL, CROSSED, mixed(3)))
def test_a_u_shaped_step_crosses_four_times(world: Sequence[Device]) -> None:
    given, table, cut, head = devices(world), profile(NETS["resnet"](), IMAGE), 1, 3
    outer = 3 * 2 * table.macs * (table.share(cut) + 1 - table.share(head))
    inner = 3 * 2 * table.macs * (table.share(head) - table.share(cut))
    bits = WORD * (table.activations[cut] + table.activations[head])

    def round_time(loss_bits: int) -> float:
        return max(
            sum(sizes) * (outer / d.flops + inner / given.server + bits / d.up + bits / d.down)
            + len(sizes) * loss_bits / d.up
            for (j, sizes), d in zip(BATCHES.items(), world, strict=True)
        )

    (time,) = durations(timed(build("sfl_v1", "resnet", cut, head), given), 1)
    assert round_time(0) * (1 - 1e-9) <= time <= round_time(WORD) * (1 + 1e-9)


def test_joint_clipping_adds_a_number_each_way_to_every_step() -> None:
    costs = of("cnn", 2, CROSSED)
    expected = max(
        sum(sizes) * costs.all(j) + len(sizes) * 64 * (1 / CROSSED[j].up + 1 / CROSSED[j].down)
        for j, sizes in BATCHES.items()
    )
    assert durations(timed(build("sfl_v1", opt=JOINT), CROSSED)) == [close(expected)] * ROUNDS


def test_a_random_cut_takes_the_time_of_the_cut_that_was_drawn() -> None:
    sim = timed(build("smofi", "cnn", 1, random_cut=(1, 3)), mixed(4))
    state, cuts = sim.start(), []
    for _ in range(5):
        before, state = sim.clock.now, sim.round(state)
        cuts.append(1 + state.memory.cut)
        assert sim.clock.now - before == close(stepwise(of("cnn", cuts[-1], mixed(4)), BATCHES))
    assert set(cuts) == {1, 2, 3}


# -- a pool --------------------------------------------------------------------------------------------------------


class Field(NamedTuple):
    """100 clients with skewed shares of CIFAR-10 and drawn devices, in small, so that it trains in no time.

    A stand-in has ResNet-18's O(2) = 0.275; batches, speeds and rates shrink such that every t stays as it is.
    """

    partition: Partition
    devices: Devices

    @classmethod
    def draw(cls, key: int) -> "Field":
        sizes = dirichlet(np.repeat(np.arange(10), 5000), 100, alpha=0.2, key=key).sizes
        pool = Pool().draw(100, REFERENCE_FLOPS, key=key)
        flops, bits = (2 / 32) * 2 * (11 * 4 + 4 * 29) / REFERENCE_FLOPS, (2 / 32) * 4 / 65536
        small = tuple(Device(d.flops * flops, d.up * bits, d.down * bits) for d in pool.clients)
        return cls(clients_of([max(2, n // 16) for n in sizes]), Devices(clients=small, server=pool.server * flops))

    def plan(self, number: int) -> Plan:
        """The batches of a round of 20 clients and 5 epochs."""
        ids = uniform(Draw(dict.fromkeys(range(100), 1), 20, round_key(number)))
        return {j: [2] * (5 * (self.partition.sizes[j] // 2)) for j in ids}

    @property
    def costs(self) -> Costs:
        return Costs(stand_in(), 1, self.devices, (11,))


def stand_in() -> nn.Module:
    """O(1) = 11 / (11 + 29), and 4 numbers at the cut."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Sequential(nn.Linear(11, 4), nn.ReLU()), nn.Linear(4, 29))


def test_closed_forms_on_drawn_pools_have_the_published_ratios() -> None:
    """By epoch 0.80 and SFL-V2 1.003 of SMoFi's time a round were published; and 0.518 hours for SMoFi."""
    rows = []
    for field in map(Field.draw, range(3)):
        costs, plans = field.costs, [field.plan(number) for number in range(40)]
        rows.append([[form(costs, plan) for plan in plans] for form in (stepwise, alone, one_server)])
    smofi, by_epoch, shared = np.mean(rows, axis=(0, 2))
    assert by_epoch / smofi == pytest.approx(0.81, abs=0.03)
    assert shared / smofi == pytest.approx(1.02, abs=0.01)
    assert smofi / 3600 == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(("name", "options", "form", "rel"), [
    ("smofi", {}, stepwise, 1e-9), ("sfl_v1", {"sync": "epoch"}, alone, 1e-9), ("sfl_v2", {}, one_server, 0.01)
], ids=("smofi", "v1 epoch", "v2"))  # fmt: skip
def test_simulated_rounds_on_a_drawn_pool_take_the_time_of_the_closed_forms(
    name: str, options: Any, form: Callable[[Costs, Plan], float], rel: float
) -> None:
    field, random = Field.draw(1), torch.Generator().manual_seed(0)
    num = int(field.partition.sizes.sum())
    x, y = torch.randn(num, 11, generator=random), torch.randint(0, 29, (num,), generator=random)
    method = methods.build(name, Split(stand_in(), 1), OPT, OPT, **options)
    world = {"per_round": 20, "devices": field.devices, "engine": "vmap", "batching": Batching(size=2, epochs=5)}
    sim = simulation(method, Arrays(x=x, y=y, num_classes=29), field.partition, **world)
    assert durations(sim, 1) == [pytest.approx(form(field.costs, field.plan(0)), rel=rel)]


# -- what all methods have in common -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "opt", "head"), [*((n, OPT, None) for n in NAMES), ("smofi", JOINT, 3)])
def test_time_does_not_depend_on_the_engine(name: str, opt: Any, head: int | None) -> None:
    def told(engine: str, **options: Any) -> tuple[float, float]:
        sim = timed(build(name, "cnn", 2, head, opt), CROSSED, engine=engine, **options)
        run(sim, 1)
        assert sim.backend.engine.name == engine
        return sim.clock.now, sim.clock.client_flops

    assert told("loop") == told("vmap") == told("vmap", chunk=2)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_gets_faster_makes_a_round_longer(name: str) -> None:
    base = devices(mixed(5), model_sync=True)
    (before,) = durations(timed(build(name), base), 1)
    for j, speed in ((0, "flops"), (1, "down"), (3, "flops"), (3, "up"), (4, "up")):
        clients = list(base.clients)
        clients[j] = clients[j]._replace(**{speed: 3 * getattr(clients[j], speed)})
        (after,) = durations(timed(build(name), replace(base, clients=tuple(clients))), 1)
        assert after <= before * (1 + 1e-12)
    (after,) = durations(timed(build(name), replace(base, server=3 * base.server)), 1)
    assert after < before if name != "fedavg" else after == before
    twice = Devices(clients=tuple(scaled(d, 2) for d in base.clients), server=4e6, model_sync=True)
    assert durations(timed(build(name), twice), 1) == [close(before / 2)]


def test_only_the_clients_of_the_round_matter() -> None:
    ids = uniform(Draw(dict.fromkeys(range(5), 1), 2, round_key(0)))
    plan = {j: BATCHES[j] for j in ids}
    for factor in (1.0, 1e-6):
        clients = [d if j in ids else scaled(d, factor) for j, d in enumerate(CROSSED)]
        sim = timed(build("smofi"), clients, per_round=2)
        assert durations(sim, 1) == [close(stepwise(of("cnn", 2, CROSSED), plan))]


@pytest.mark.parametrize(
    ("net", "cut", "head"), [("cnn", 0, None), ("cnn", 2, None), ("cnn", 4, None), ("resnet", 1, 3)]
)
def test_clients_are_charged_three_forward_passes_of_their_units(net: str, cut: int, head: int | None) -> None:
    sim = timed(build("sfl_v1", net, cut, head), CROSSED)
    run(sim, ROUNDS)
    below = profile(NETS[net](), IMAGE).cumulative_forward_flops
    own = below[cut] + (0 if head is None else below[-1] - below[head])
    assert sim.clock.client_flops == ROUNDS * 3 * own * sum(map(sum, BATCHES.values()))


@pytest.mark.parametrize("cut", (0, 4))
def test_an_empty_side_takes_no_time(cut: int) -> None:
    sim = timed(build("sfl_v1", "cnn", cut), CROSSED)
    assert durations(sim, 1) == [close(alone(of("cnn", cut, CROSSED), BATCHES))]


def test_attention_is_work_too() -> None:
    net = models.build("char_transformer", num_classes=7, width=8, layers=2, heads=2, context=5)
    x = torch.randint(0, 7, (10, 5), generator=torch.Generator().manual_seed(0))
    method = methods.sfl_v1(model=Split(net, 2), client_opt=OPT, server_opt=OPT)
    data = Arrays(x=x, y=x[:, 0], num_classes=7)
    sim = simulation(method, data, clients_of((4, 6)), batching=Batching(size=2), devices=devices(CROSSED))
    run(sim, 1)
    assert sim.clock.client_flops == 10 * 3 * profile(net, x).cumulative_forward_flops[2] > 0


class Looks(nn.Module):
    """Reads its values, which bare shapes do not have."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > -1e9 else -x


def looking() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), Looks(), nn.Dropout(0.3))
        return nn.Sequential(first, nn.Sequential(nn.Flatten(), nn.Linear(72, 10)))


@pytest.mark.parametrize("name", NAMES)
def test_the_clock_changes_no_number_of_training(name: str) -> None:
    for net in (resnet(dtype=torch.float32), looking()):
        method = methods.build(name, Split(net, 1), OPT, OPT)
        without, with_clock = (
            trained(method, images(dtype=torch.float32), rounds=1, devices=d) for d in (None, devices(mixed(6)))
        )
        agree(without, with_clock, tol=0.0)


def test_a_function_that_looks_at_its_values_is_charged_all_the_same() -> None:
    sim = timed(methods.sfl_v1(model=Split(looking(), 1), client_opt=OPT, server_opt=OPT), CROSSED)
    run(sim, 1)
    convolution = 2 * (1 * 2 * 3 * 3) * 6 * 6
    assert sim.clock.client_flops == 3 * convolution * sum(map(sum, BATCHES.values()))


def without_times(value: Any) -> Any:
    return tree.replace(Held, lambda held: replace(held, ready=0.0), value)


@pytest.mark.parametrize("name", NAMES)
def test_a_clock_goes_on_where_it_was(name: str) -> None:
    whole = timed(build(name), CROSSED)
    run(whole, 3)
    first, second = timed(build(name), CROSSED), timed(build(name), CROSSED)
    state = run(first, 1)
    content = first.clock.content()
    assert content == {"now": first.clock.now, "client_flops": first.clock.client_flops}
    second.clock.restore(content)
    state = without_times(state)  # the clock's content is all that is needed
    for _ in range(2):
        state = second.round(state)
    assert second.clock.content() == whole.clock.content()


def test_a_state_from_elsewhere_starts_at_this_clock() -> None:
    """What a state holds is there when a round begins, whenever another simulation made it."""
    first, second = timed(build("smofi"), CROSSED), timed(build("smofi"), CROSSED)
    second.round(run(first, 1))
    assert second.clock.now == close(first.clock.now)


def test_too_few_devices_are_refused() -> None:
    words = "there are 4 devices for 5 clients; give each client one"
    with pytest.raises(ConfigError, match=f"^{words}$"):
        timed(build("smofi"), CROSSED[:4])
