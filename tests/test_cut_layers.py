"""Specifies the cuts for given batch sizes: the best of all, by the paper's programme and by descent."""

import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from planning_problems import all_cuts, at_random, ratios, table_one, two_devices, uneven

from cutlayer.errors import InfeasibleError
from cutlayer.planning import cut_layers, cut_programme
from cutlayer.planning.cut_programme import dinkelbach
from cutlayer.planning.problem import Ints, Problem

EVERY = all_cuts(3, 16)


def some_batches(problem: Problem, seed: int) -> Ints:
    """Any that fit with one layer."""
    most = np.minimum(64, np.maximum(problem.table.capacity[:, 0], 1)).astype(int)
    return np.random.default_rng(seed).integers(1, most + 1)


def test_the_best_cuts_are_the_best_of_all() -> None:
    """Against all 16^3 cuts on 200 problems at random, short of memory or not, with and without drift."""
    compared, mixed = 0, 0
    for seed in range(260):
        problem = at_random(seed)
        batches = some_batches(problem, seed)
        values = ratios(problem, batches[None], EVERY)
        if values.min() < np.inf:
            found = cut_layers.best(problem, batches)
            assert ratios(problem, batches[None], found[None])[0] == pytest.approx(values.min(), rel=1e-12), seed
            compared += 1
            mixed += len(set(found.tolist())) > 1
    assert compared >= 200
    assert mixed >= 50  # not all of them are easy


def test_the_papers_programme_alone_finds_them_too() -> None:
    """Every cut open, from a ratio of 0: Dinkelbach's sequence as published, against all 16^3 cuts on 200 problems."""
    compared = 0
    for seed in range(260):
        problem = at_random(seed)
        batches = some_batches(problem, seed)
        values = ratios(problem, batches[None], EVERY)
        if values.min() < np.inf:
            found = dinkelbach(problem, batches)
            assert found is not None
            assert ratios(problem, batches[None], found[None])[0] == pytest.approx(values.min(), rel=1e-9), seed
            compared += 1
    assert compared >= 200


@pytest.mark.parametrize(("draw", "seed"), [(table_one, 0), (uneven, 0), (uneven, 1)])
def test_screening_loses_nothing_among_many_devices(draw: Callable[[int], Problem], seed: int) -> None:
    problem = draw(seed)
    batches = np.random.default_rng(0).integers(4, 33, 20)
    whole = dinkelbach(problem, batches)
    assert whole is not None
    assert problem.seconds(batches, cut_layers.best(problem, batches)) == pytest.approx(
        problem.seconds(batches, whole), rel=1e-9
    )


def test_screening_keeps_every_cut_of_every_better_plan() -> None:
    for seed in range(20):
        problem = at_random(seed)
        batches = some_batches(problem, seed)
        values = ratios(problem, batches[None], EVERY)
        if values.min() == np.inf:
            continue
        ratio = 1.2 * values.min()
        kept = cut_layers.screen(problem, batches, ratio)
        for cuts in EVERY[values < ratio * (1 - 1e-6)]:
            assert kept[np.arange(3), cuts - 1].all()


def test_descent_ends_where_no_single_change_helps() -> None:
    for seed in range(20):
        problem = at_random(seed)
        batches = some_batches(problem, seed)
        start = np.ones(3, dtype=int)
        if ratios(problem, batches[None], start[None])[0] == np.inf:
            continue
        found = cut_layers.descend(problem, batches, start)
        reached = ratios(problem, batches[None], found[None])[0]
        assert reached <= ratios(problem, batches[None], start[None])[0]
        single = EVERY[(found != EVERY).sum(axis=1) == 1]
        assert (ratios(problem, batches[None], single) >= reached * (1 - 1e-8)).all()


def test_descent_leaves_its_start_alone() -> None:
    start = np.full(20, 9)
    cut_layers.descend(uneven(0), np.full(20, 16), start)
    assert start.tolist() == [9] * 20


@pytest.mark.parametrize("status", [1, 2, 4])
def test_descent_from_the_previous_cuts_where_the_solver_gives_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    seed, problem = next((s, at_random(s)) for s in range(260) if needs_the_solver(at_random(s), s))
    batches, previous = some_batches(problem, seed), np.ones(3, dtype=int)
    monkeypatch.setattr(cut_programme, "milp", lambda *args, **options: SimpleNamespace(status=status, x=None))
    with caplog.at_level(logging.WARNING, logger="cutlayer"):
        found = cut_layers.best(problem, batches, previous)
    assert caplog.messages == ["the solver found no cuts for 3 devices in time; descent did"]
    assert problem.seconds(batches, found) <= problem.seconds(batches, cut_layers.descend(problem, batches, previous))


def needs_the_solver(problem: Problem, seed: int) -> bool:
    batches = some_batches(problem, seed)
    if ratios(problem, batches[None], np.ones((1, 3), dtype=int))[0] == np.inf:
        return False
    found = cut_layers.quick(problem, batches, np.ones(3, dtype=int), starts=cut_layers.STARTS)
    ratio = cut_layers.ratio_of(problem, batches, found)
    return bool(cut_layers.screen(problem, batches, ratio).any(axis=1).all())


def test_an_answer_that_breaks_a_limit_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that calls the deepest cut optimal for everyone, though no device has the memory."""
    problem = two_devices()
    small = replace(problem, fleet=replace(problem.fleet, memory=np.full(2, 100.5)))
    everywhere = np.append(np.tile([0.0, 0.0, 1.0], 2), np.zeros(6))
    monkeypatch.setattr(cut_programme, "milp", lambda *args, **options: SimpleNamespace(status=0, x=everywhere))
    assert dinkelbach(small, np.array([60, 60])) is None


def test_without_drift_one_programme_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(uneven(0), interval=1)
    solved = []
    original = cut_programme.milp
    monkeypatch.setattr(cut_programme, "milp", lambda *args, **options: solved.append(1) or original(*args, **options))
    assert dinkelbach(problem, np.full(20, 16)) is not None
    assert len(solved) == 1


def test_a_batch_that_fits_no_cut() -> None:
    problem = two_devices()
    small = replace(problem, fleet=replace(problem.fleet, memory=np.array([100.0, 9.5])))
    with pytest.raises(InfeasibleError) as caught:
        cut_layers.best(small, np.array([10, 10]))
    assert caught.value.why == "infeasible_memory"
    assert str(caught.value) == (
        "a batch of 10 does not fit device 1, not even with one layer; lower it to 9 or give the device more memory or "
        "samples"
    )


def test_batches_that_miss_the_target_with_any_cuts() -> None:
    with pytest.raises(InfeasibleError) as caught:
        cut_layers.best(two_devices(), np.array([2, 2]))
    assert caught.value.why == "infeasible_eps"
    assert str(caught.value) == (
        "no cuts reach the target 0.1 with these batch sizes; raise the batch sizes or the target"
    )


def test_a_device_short_of_memory_gets_a_shallower_cut() -> None:
    problem = table_one(0)
    batches = np.full(20, 16)
    cuts = cut_layers.best(problem, batches)
    assert cuts[3] > 1
    memory = problem.fleet.memory.copy()
    memory[3] = 16 * problem.costs.held[0] + problem.costs.model[0] + 1
    found = cut_layers.best(replace(problem, fleet=replace(problem.fleet, memory=memory)), batches)
    assert found[3] == 1


def test_descent_alone_beyond_the_most_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("solved a programme")

    monkeypatch.setattr(cut_programme, "milp", refuse)
    problem = uneven(0, cut_layers.MOST_PROVEN + 1)
    batches = np.random.default_rng(0).integers(4, 33, problem.num_devices)
    assert problem.seconds(batches, cut_layers.best(problem, batches)) < problem.seconds(batches, np.ones_like(batches))
