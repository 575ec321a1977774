"""Specifies which samples a client trains on, and who takes part in each step of a round."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SIZES, clients_of, images, resnet, simulation
from hypothesis import given, settings
from hypothesis import strategies as st

from cutlayer import methods, optim
from cutlayer.core.batches import Batching, Walk
from cutlayer.core.memory import Memory
from cutlayer.core.meter import Meter
from cutlayer.core.places import Clients, Step, World
from cutlayer.core.program import Program
from cutlayer.engines.local import Local
from cutlayer.engines.loop import Loop
from cutlayer.errors import ConfigError
from cutlayer.pieces.sampler import Draw, shuffled, uniform
from cutlayer.pieces.sizes import Regulated
from cutlayer.split import Split

OPT = optim.sgd(0.1)


def walk(batching: Batching, sizes: tuple[int, ...] = SIZES, key: int = 7) -> Walk:
    return Walk(batching, clients_of(sizes).clients, key, {})


def steps(batching: Batching, sizes: tuple[int, ...] = SIZES, **options: Any) -> list[Step]:
    """The steps of a round of all these clients."""
    index = clients_of(sizes).clients
    world = World(
        program=Program(object()),
        transport=Local(engine=Loop(), data=images(), kept=Memory(), key=7),
        walk=lambda regulated: Walk(batching, index, 7, regulated),
        sizes={j: float(len(i)) for j, i in enumerate(index)},
        key=7,
    )
    return list(Clients(world, tuple(range(len(index)))).steps(**options))


# -- A client's own batches --------------------------------------------------------------------------------------------

STEPS = [  # samples, size, options, steps in a round
    (12, 4, {}, 3),
    (15, 4, {}, 3),
    (15, 4, {"epochs": 5}, 15),
    (3, 4, {}, 1),  # less than a batch: all at once
    (3, 4, {"epochs": 2}, 2),
    (1, 4, {}, 0),  # one sample is no batch
    (0, 4, {}, 0),
    (15, 4, {"drop_last": False}, 4),
    (13, 4, {"drop_last": False}, 3),  # the batch of one is left out
    (12, 4, {"drop_last": False}, 3),
    (1, 4, {"drop_last": False}, 0),
    (12, 4, {"steps": 7}, 7),
    (3, 4, {"steps": 7}, 7),
    (1, 4, {"steps": 7}, 0),
    (12, 4, {"steps": 7, "epochs": 3}, 7),
]


@pytest.mark.parametrize(("samples", "size", "options", "expected"), STEPS)
def test_how_many_steps_a_client_takes(samples: int, size: int, options: dict[str, Any], expected: int) -> None:
    assert walk(Batching(size=size, **options), (samples,)).per_round(0) == expected


@given(st.integers(2, 40), st.integers(2, 9), st.integers(1, 3), st.booleans(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_pass_visits_each_sample_once_but_the_rest(
    samples: int, size: int, epochs: int, drop_last: bool, key: int
) -> None:
    batches = walk(Batching(size=size, epochs=epochs, drop_last=drop_last), (5, samples), key=key)
    per_epoch = batches.per_epoch(1)
    for epoch in range(epochs):
        seen = [batches.samples(1, epoch * per_epoch + k) for k in range(per_epoch)]
        flat = np.concatenate(seen).tolist()
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(5, 5 + samples))
        assert all(len(batch) == min(size, samples) for batch in seen[:-1])
        left_out = samples - len(flat)
        assert left_out < size if drop_last else left_out <= 1
        assert min(len(batch) for batch in seen) >= 2


def test_the_same_key_draws_the_same_batches_and_another_key_others() -> None:
    batching = Batching(size=4, epochs=2)
    first, again, other = (walk(batching, key=key) for key in (7, 7, 8))
    order = [(j, k) for j in range(len(SIZES)) for k in range(first.per_round(j))]
    backwards = {at: again.samples(*at) for at in reversed(order)}  # in whatever order they are asked for
    assert all(np.array_equal(first.samples(*at), backwards[at]) for at in order)
    assert any(not np.array_equal(first.samples(*at), other.samples(*at)) for at in order)


def test_every_pass_is_shuffled_anew() -> None:
    batches = walk(Batching(size=20, epochs=2))
    first, second = batches.samples(1, 0), batches.samples(1, 1)
    assert sorted(first) == sorted(second) and not np.array_equal(first, second)


def test_a_fixed_number_of_steps_starts_the_data_over() -> None:
    fixed, passes = walk(Batching(size=4, steps=7)), walk(Batching(size=4, epochs=3))
    assert all(np.array_equal(fixed.samples(0, k), passes.samples(0, k)) for k in range(7))


def test_clients_draw_apart() -> None:
    same_samples = (np.arange(8), np.arange(8))
    batches = Walk(Batching(size=8), same_samples, 7, {})
    assert not np.array_equal(batches.samples(0, 0), batches.samples(1, 0))


def test_regulated_sizes_replace_the_runs_for_the_clients_they_name() -> None:
    batches = Walk(Batching(size=4), clients_of().clients, 7, {0: 6})
    assert [len(batches.samples(0, k)) for k in range(batches.per_round(0))] == [6, 6]
    assert [len(batches.samples(1, k)) for k in range(batches.per_round(1))] == [4] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "batching: size is 0; it must be at least 1"),
        ({"epochs": -1}, "batching: epochs is -1; it must be at least 1"),
        ({"steps": 0}, "batching: steps is 0; it must be at least 1"),
    ],
)
def test_batching_refuses_nonsense(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Batching(**options)
    assert str(caught.value) == message


REGULATED = [  # seconds per sample, largest, ingress, sizes
    ((1.0, 2.0, 1.0, 0.5, 4.0), 8, None, (4, 2, 4, 8, 1)),
    ((1.0, 2.0, 1.0, 0.5, 4.0), 8, 19, (4, 2, 4, 8, 1)),
    ((1.0, 2.0, 1.0, 0.5, 4.0), 8, 10, (2, 1, 2, 4, 1)),  # 10/19 of each
    (
        (0.39, 1.0, 1.0, 1.0, 1.0, 1.0),
        10,
        22,
        (8, 2, 2, 2, 2, 2),
    ),  # 22/25 of 10 and 3: never more than the server takes
    ((1.0, 100.0), 8, None, (8, 1)),
    ((1 / 49,), 49, None, (49,)),  # 49 · (1/49) is below 1 in floating point
]


@pytest.mark.parametrize(("seconds", "largest", "ingress", "expected"), REGULATED)
def test_regulated_sizes_equalise_the_time_of_a_step(
    seconds: tuple[float, ...], largest: int, ingress: int | None, expected: tuple[int, ...]
) -> None:
    sizes = Regulated(seconds=seconds, largest=largest, ingress=ingress)
    assert sizes(range(len(seconds)), 99) == dict(enumerate(expected))


def test_the_runs_batch_size_is_the_largest_by_default() -> None:
    assert Regulated(seconds=(1.0, 2.0, 4.0))((0, 1, 2), 32) == {0: 32, 1: 16, 2: 8}


def test_a_server_never_takes_more_than_its_ingress() -> None:
    for ingress in range(3, 34):
        sizes = Regulated(seconds=(1.0, 30.0, 30.0), largest=30, ingress=ingress)((0, 1, 2), 99)
        assert sizes == {0: min(30, ingress - 2), 1: 1, 2: 1}
    with pytest.raises(ConfigError) as caught:
        Regulated(seconds=(1.0, 2.0, 4.0), ingress=2)((0, 1, 2), 8)
    assert str(caught.value) == (
        "regulated batch sizes: ingress is 2, but each of the round's 3 clients sends at least one sample a step; "
        "give an ingress of at least 3, or fewer clients a round"
    )


@pytest.mark.parametrize("seconds", [(), (1.0, 0.0), (1.0, float("nan")), (float("inf"),)])
def test_seconds_per_sample_are_positive_numbers(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^regulated batch sizes need the seconds per sample of every client"):
        Regulated(seconds=seconds)


def test_the_fastest_client_of_the_round_sets_the_pace() -> None:
    assert Regulated(seconds=(1.0, 2.0, 4.0), largest=8)((1, 2), 99) == {1: 8, 2: 4}
    with pytest.raises(ConfigError) as caught:
        Regulated(seconds=(1.0, 2.0), largest=8)((1, 2), 99)
    assert str(caught.value) == "regulated batch sizes: no seconds per sample for client 2; 2 were given"


# -- The steps of a round ----------------------------------------------------------------------------------------------


def test_clients_leave_when_their_batches_run_out() -> None:
    round_ = steps(Batching(size=4))
    assert [step.active.ids for step in round_] == [(0, 1, 2, 3, 4), (0, 1, 2, 3), (0, 1, 3), (1, 3), (1, 3)]
    assert [step.staying.ids for step in round_] == [(0, 1, 2, 3), (0, 1, 3), (1, 3), (1, 3), ()]
    assert [list(step.idle.values()) for step in round_] == [
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
        [0, 0, 1, 0, 2],
        [1, 0, 2, 0, 3],
        [2, 0, 3, 0, 4],
    ]
    assert [step.number for step in round_] == [0, 1, 2, 3, 4]
    assert round_[0].sizes == {0: 4, 1: 4, 2: 4, 3: 4, 4: 3}
    assert not any(step.ends_epoch for step in round_)


def test_a_step_carries_the_samples_of_the_walk() -> None:
    data, batches = images(), walk(Batching(size=4, epochs=2))
    own_step = dict.fromkeys(range(len(SIZES)), 0)
    for step in steps(Batching(size=4, epochs=2)):
        for j in step.active.ids:
            samples = torch.from_numpy(batches.samples(j, own_step[j]))
            assert torch.equal(step.x.at(j), data.x[samples]) and torch.equal(step.y.at(j), data.y[samples])
            own_step[j] += 1
    assert own_step == {0: 6, 1: 10, 2: 4, 3: 10, 4: 2}


def test_a_barrier_holds_everyone_until_the_epoch_has_ended() -> None:
    """3 and 2 steps an epoch: 3 + 3 steps in all, where they would be done after 6 and 4."""
    batching = Batching(size=4, epochs=2)
    round_ = steps(batching, (12, 8), barrier="epoch")
    assert [step.active.ids for step in round_] == [(0, 1), (0, 1), (0,)] * 2
    assert [step.ends_epoch for step in round_] == [False, False, True] * 2
    assert [step.active.ids for step in steps(batching, (12, 8))] == [(0, 1)] * 4 + [(0,)] * 2


def test_idle_counts_go_on_through_a_barrier() -> None:
    """Five steps each, in passes of 5 and 2: the first client waits from step 5 on."""
    round_ = steps(Batching(size=4, steps=5), (20, 8), barrier="epoch")
    assert [step.active.ids for step in round_] == [(0, 1), (0, 1), (0,), (0,), (0,), (1,), (1,), (1,)]
    assert [list(step.idle.values()) for step in round_] == [
        *([0, 0], [0, 0], [0, 1], [0, 2], [0, 3]),
        *([1, 0], [2, 0], [3, 0]),
    ]


def test_every_step_of_every_client_has_its_own_key() -> None:
    keys = [int(step.key.at(j)) for step in steps(Batching(size=4)) for j in step.active.ids]
    assert len(set(keys)) == len(keys) == 16


# -- The clients of a run ----------------------------------------------------------------------------------------------


class Sizes(Meter):
    """Keeps the batch sizes of every step."""

    def __init__(self) -> None:
        self.seen: list[Mapping[int, int]] = []

    def stepped(self, sizes: Mapping[int, int]) -> None:
        self.seen.append(sizes)


def fedavg() -> methods.Method:
    return methods.build("fedavg", Split(resnet(), 1), OPT, OPT)


def test_a_client_with_one_sample_takes_no_part() -> None:
    meter = Sizes()
    sim = simulation(fedavg(), partition=clients_of((8, 1, 0, 6)), meters=(meter,))
    assert sim.job.ids == (0, 3)
    sim.round(sim.start())
    assert meter.seen == [{0: 4, 3: 4}, {0: 4}]


REFUSED = [
    (
        (12, 20),
        {"batching": Batching(size=64)},
        "batch size 64 is larger than every client's data (the largest client holds 20 samples); "
        "use a batch of at most 20, or fewer clients",
    ),
    (
        (1, 1),
        {"batching": Batching(size=1)},
        "no client holds at least 2 samples, so nobody can train; use fewer clients or more data",
    ),
    ((8, 8), {"per_round": 3}, "per_round is 3; it must be from 1 to the 2 clients that hold data"),
    ((8, 8), {"per_round": 0}, "per_round is 0; it must be from 1 to the 2 clients that hold data"),
]


@pytest.mark.parametrize(("sizes", "options", "message"), REFUSED)
def test_a_run_that_nobody_could_train_in_is_refused(
    sizes: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        simulation(fedavg(), partition=clients_of(sizes), **options)
    assert str(caught.value) == message


def test_a_sample_of_clients_is_uniform_without_replacement_and_sorted() -> None:
    four = dict.fromkeys((2, 3, 5, 7), 1)
    draws = [uniform(Draw(four, 2, key)) for key in range(600)]
    assert draws == [uniform(Draw(four, 2, key)) for key in range(600)]
    assert all(a < b for a, b in draws)
    counts = {j: sum(j in draw for draw in draws) for j in (2, 3, 5, 7)}
    assert all(abs(count - 300) < 50 for count in counts.values()), counts  # 4 standard deviations
    assert uniform(Draw(four, 4, 0)) == (2, 3, 5, 7)


def test_an_order_is_a_permutation_of_its_own_for_each_step() -> None:
    orders = {shuffled((2, 3, 5, 7), 1, step) for step in range(50)}
    assert all(sorted(order) == [2, 3, 5, 7] for order in orders)
    assert len(orders) > 10
