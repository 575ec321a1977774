"""Runs made smaller: what shrinks, what stays, and that the result can still be drawn and trained."""

from dataclasses import replace

import pytest

from cutlayer import recipes
from cutlayer.core.batches import Batching
from cutlayer.data.partition import dirichlet
from cutlayer.errors import ConfigError
from cutlayer.recipes.scale import scaled, size_of, unscaled
from cutlayer.runs import config
from cutlayer.runs.config import Choice, Run

BIG = Run(
    name="table/images/fedavg",
    clients=100,
    per_round=20,
    rounds=1000,
    eval_every=10,
    checkpoint_every=50,
    batching=Batching(size=32, steps=75),
    optimiser=Choice("sgd", {"lr": {"schedule": "cosine", "lr": 0.1, "rounds": 1000, "warmup": 5}, "momentum": 0.9}),
    server_optimiser=Choice("sgd", {"lr": {"schedule": "steps", "lr": 0.1, "milestones": (500, 750)}}),
)


def test_clients_samples_and_rounds_shrink_together() -> None:
    small = scaled(BIG, 0.1)
    assert small == replace(
        BIG,
        name="table@0.1/images/fedavg",
        clients=10,
        per_round=2,
        subset=0.1,
        rounds=100,
        eval_every=1,
        checkpoint_every=5,
        optimiser=Choice("sgd", {"lr": {"schedule": "cosine", "lr": 0.1, "rounds": 100, "warmup": 1}, "momentum": 0.9}),
        server_optimiser=Choice("sgd", {"lr": {"schedule": "steps", "lr": 0.1, "milestones": (50, 75)}}),
    )
    assert size_of(BIG, small) == "10 of 100 clients, 100 of 1000 rounds, 10 % of the samples"
    assert scaled(BIG, 1) == BIG


def test_every_scale_leaves_at_least_one_of_everything() -> None:
    small = scaled(BIG, 1e-6)
    assert (small.clients, small.per_round, small.rounds, small.eval_every) == (2, 2, 2, 1)
    assert small.subset == 0.02  # of 100 clients two are left, each with as much data as before
    alone = scaled(Run(clients=1, rounds=1), 0.5)
    assert (alone.clients, alone.per_round, alone.rounds, alone.subset) == (1, None, 1, 1.0)
    assert scaled(replace(BIG, per_round=1), 0.1).per_round == 1  # as the recipe has it


def test_a_decay_after_each_round_and_everything_else_stays() -> None:
    decay = Choice("sgd", {"lr": {"schedule": "exponential", "lr": 0.1, "decay": 0.998}})
    small = scaled(replace(BIG, optimiser=decay), 0.1)
    assert (small.optimiser, small.batching, small.partition) == (decay, BIG.batching, BIG.partition)


def test_a_sum_over_the_rounds_clients_shrinks_with_them() -> None:
    merge = Choice("mergesfl", {"seconds_per_sample": (1.0,) * 100, "ingress": 640, "largest_batch": 32})
    options = scaled(replace(BIG, method=merge), 0.1).method.options
    assert (options["ingress"], options["largest_batch"]) == (64, 32)


def test_clients_by_nature_keep_their_samples() -> None:
    small = scaled(replace(BIG, partition=Choice("natural")), 0.1)
    assert (small.clients, small.subset) == (10, 1.0)
    assert size_of(BIG, small) == "10 of 100 clients, 100 of 1000 rounds, all samples of these clients"


def test_the_printed_scale_reflects_later_changes() -> None:
    small = replace(scaled(BIG, 0.1), rounds=2000, clients=100, subset=1.0)
    assert size_of(BIG, small) == "100 of 100 clients, 2000 rounds instead of 1000, all samples"
    assert size_of(replace(BIG, subset=0.5), scaled(replace(BIG, subset=0.5), 0.1)).endswith(", 10 % of the samples")


@pytest.mark.parametrize("factor", [0, -0.1, 1.5])
def test_a_scale_is_a_part(factor: float) -> None:
    with pytest.raises(ConfigError) as caught:
        scaled(BIG, factor)
    assert str(caught.value) == f"the scale is {factor:g}; it must be above 0 and at most 1"


def test_the_scale_is_in_the_first_word_of_the_name() -> None:
    assert [unscaled(n) for n in ("table@0.1/images/a", "mine@0.5", "mine", "t/a@b")] == [
        "table/images/a",
        "mine",
        "mine",
        "t/a@b",
    ]
    known = recipes.of("digits@0.25/fedavg")
    assert known is not None and [run.name for run in known.runs] == [run.name for run in recipes.runs("digits")]
    assert recipes.of("digits_cuts@0.1/iid/sl") is None and recipes.of("") is None


@pytest.mark.parametrize("factor", [0.5, 0.1, 0.02])
def test_the_smallest_client_can_still_be_drawn(factor: float) -> None:
    clients, samples, smallest = 100, 50_000, 32
    small = scaled(replace(BIG, clients=clients), factor)
    labels = [i % 10 for i in range(round(samples * small.subset))]
    partition = dirichlet(labels, small.clients, alpha=0.2, key=0, min_size=smallest)
    assert min(partition.sizes) >= smallest


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_recipe_can_be_scaled_and_is_then_still_valid(name: str) -> None:
    for run in recipes.runs(name):
        small = scaled(run, 0.05)
        assert config.changed(Run(), config.as_dict(small), name) == small
        assert small.rounds <= run.rounds and small.clients <= run.clients
