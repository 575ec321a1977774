"""Specifies the planner: the best plan in both modes, what it says of it, and every case that has no plan."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_problems import all_cuts, at_random, ratios, table_one, two_devices, uneven, vgg_costs

from cutlayer.errors import ConfigError, InfeasibleError
from cutlayer.models import vgg16
from cutlayer.planning import batch_sizes, cut_layers
from cutlayer.planning.devices import Device, Devices
from cutlayer.planning.planner import MODES, Plan, alternate, least, plan, refine, solve, start
from cutlayer.planning.problem import Bound, Floats, Problem
from cutlayer.planning.profile import profile

NO_TARGET = (
    "no batch sizes reach the target 0.1 with these cuts; raise the target, lower the learning rate or the interval, "
    "or give the devices more memory or samples"
)


def with_memory(problem: Problem, memory: Floats) -> Problem:
    return replace(problem, fleet=replace(problem.fleet, memory=memory))


def with_bound(problem: Problem, **changes: float) -> Problem:
    return replace(problem, bound=replace(problem.bound, **changes))


# -- how good the plans are -------------------------------------------------------------------------------------------


def test_joint_finds_the_best_of_all_plans() -> None:
    """Against all cuts of three devices and five layers, each with its best batches."""
    compared = 0
    for seed in range(12):
        problem = replace(at_random(seed, layers=5), samples=np.full(3, 50))
        if (problem.table.capacity[:, 0] < 1).any():
            continue
        best = np.inf
        for cuts in all_cuts(3, 5):
            if (problem.capacity(cuts) >= 1).all() and problem.headroom(np.full(3, 50), cuts) > 0:
                best = min(best, best_seconds(problem, cuts))
        if best < np.inf:
            assert solve(problem).seconds == pytest.approx(best, rel=1e-9), seed
            compared += 1
    assert compared >= 8


def best_seconds(problem: Problem, cuts: np.ndarray) -> float:
    try:
        return problem.seconds(batch_sizes.joint(problem, cuts), cuts)
    except InfeasibleError:
        return np.inf


@pytest.mark.slow
def test_joint_is_never_worse_than_paper() -> None:
    better = 0
    problems = [uneven(seed) for seed in range(4)] + [at_random(seed, num_devices=6) for seed in range(20)]
    for problem in problems:
        try:
            paper = solve(problem, mode="paper").seconds
        except InfeasibleError:
            continue
        joint = solve(problem).seconds
        assert joint <= paper
        better += joint < 0.99 * paper
    assert better >= 10


@pytest.mark.parametrize("seed", range(3))
def test_any_start_leads_to_the_same_time_where_devices_are_alike(seed: int) -> None:
    problem = table_one(seed)
    found = [
        problem.seconds(*refine(problem, start(problem, batch))) for batch in (3, 5, 8, 12, 16, 24, 32, 64, 100, 128)
    ]
    assert max(found) <= 1.001 * min(found)


def test_the_paper_s_mode_depends_on_its_start() -> None:
    problem = uneven(0)
    found = [problem.seconds(*alternate(problem, start(problem, batch), "paper")) for batch in (8, 16, 64)]
    assert max(found) > 1.5 * min(found)
    assert solve(problem, mode="paper").seconds <= min(found)


def test_alike_devices_get_alike_plans() -> None:
    for seed in range(3):
        planned = solve(table_one(seed))
        assert set(planned.plan.cuts) == {4}
        assert np.ptp(planned.plan.batches) <= 2
        assert 7 <= min(planned.plan.batches) <= 8


def test_unlike_devices_get_unlike_batches() -> None:
    planned = solve(uneven(0))
    assert max(planned.plan.batches) > 3 * min(planned.plan.batches)
    assert planned.seconds < planned.problem.seconds(*planned.before) / 2


def test_descent_alone_is_as_good_among_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = uneven(0, 100)
    exact = solve(problem).seconds
    monkeypatch.setattr(cut_layers, "MOST_PROVEN", 0)
    assert solve(problem).seconds <= 1.001 * exact


def test_the_same_problem_has_the_same_plan() -> None:
    assert solve(uneven(3)).plan == solve(uneven(3)).plan


# -- what is said of a plan -------------------------------------------------------------------------------------------


def test_a_plan_is_described_by_the_problem() -> None:
    planned = solve(uneven(0))
    problem, (batches, cuts) = planned.problem, planned.plan
    assert planned.devices == tuple(range(20))
    assert planned.excluded == planned.notes == ()
    assert planned.before == Plan((16,) * 20, (8,) * 20)
    assert planned.seconds == problem.seconds(batches, cuts)
    assert planned.rounds == problem.rounds(batches, cuts)
    assert planned.seconds_per_round == problem.seconds_per_round(batches, cuts)
    assert planned.seconds == pytest.approx(planned.rounds * planned.seconds_per_round)
    assert planned.straggler == planned.latency.own.argmax()
    assert planned.straggler_before == planned.latency_before.own.argmax()
    assert planned.latency_before.split == problem.latency(*planned.before).split


def test_the_usual_plan_is_clipped_to_what_fits() -> None:
    problem = table_one(0)
    costs = problem.costs
    memory = np.full(20, np.inf)
    memory[0] = 16 * costs.held[2] + costs.model[2] + 1  # three layers with 16 samples, no fourth
    memory[1] = 5.5 * costs.held[0] + costs.model[0]  # five samples with one layer
    few = replace(with_memory(problem, memory), samples=np.array([100] * 19 + [7]))
    before = solve(few).before
    assert (before.batches[:2], before.cuts[:2]) == ((16, 5), (3, 1))
    assert (before.batches[19], before.cuts[19]) == (7, 8)


def test_the_binding_limit_of_each_batch() -> None:
    problem = uneven(0)
    costs = problem.costs
    memory = np.full(20, np.inf)
    memory[0] = 2.5 * costs.held[0] + costs.model[0]
    few = replace(with_memory(problem, memory), samples=np.array([1000] * 19 + [2]))
    planned = solve(few)
    assert planned.bindings[0] == "memory"
    assert planned.bindings[19] == "samples"
    assert planned.bindings[planned.straggler] == "forward and uplink"
    assert set(planned.bindings) <= {"memory", "samples", "forward and uplink", "downlink and backward", "optimum"}


def test_a_slow_server_keeps_batches_small_by_itself() -> None:
    problem = table_one(0)
    slow = replace(problem, fleet=replace(problem.fleet, server=1e10))
    fast = replace(
        slow, fleet=replace(slow.fleet, flops=np.full(20, 1e15), up=np.full(20, 1e13), down=np.full(20, 1e13))
    )
    deep = replace(fast, fleet=replace(fast.fleet, fed_up=np.full(20, 1e5)))  # whole models at the devices do not pay
    assert set(solve(deep).bindings) == {"optimum"}


def test_a_slow_way_back_binds() -> None:
    problem = table_one(0)
    down = np.full(20, 370e6)
    down[4] = 1e6
    planned = solve(replace(problem, fleet=replace(problem.fleet, down=down)))
    assert planned.bindings[4] == "downlink and backward"
    assert planned.straggler == 4


# -- no plan, or not the one asked for --------------------------------------------------------------------------------


def test_a_target_below_any_drift_is_raised() -> None:
    problem = table_one(0)  # K = 4 (50 * 5e-4 * 15)^2 = 0.5625, times 0.1
    planned = solve(with_bound(problem, target=0.05))
    note = (
        f"raised_eps: the target 0.05 is now {problem.target:.3g}, because even the shallowest cut drifts by 0.0563; "
        "lower the learning rate or the interval"
    )
    assert planned.notes == (note,)
    assert planned.plan == solve(problem).plan
    assert planned.problem.target == problem.target


def test_a_learning_rate_beyond_the_theorem() -> None:
    problem = with_bound(table_one(0), lr=0.025)  # beta is 50
    rule = f"{problem.target:.3g}"
    why = "because the learning rate 0.025 is above 1 / beta = 0.02; lower the learning rate or the interval"
    assert solve(with_bound(problem, target=150.0)).notes == (f"raised_eps: the target 150 is now {rule}, {why}",)
    assert solve(with_bound(problem, target=1e6)).notes == (f"no_theorem: {why.removeprefix('because ')}",)


def few_samples() -> Problem:
    """Two samples each leave no headroom: A = 0.1 = B (1/2 + 1/2)."""
    return replace(two_devices(), samples=np.array([2, 2]))


@pytest.mark.parametrize("mode", MODES)
def test_a_target_out_of_reach(mode: str) -> None:
    with pytest.raises(InfeasibleError) as caught:
        solve(few_samples(), mode=mode)
    assert caught.value.why == "infeasible_eps"
    assert str(caught.value) == NO_TARGET


def test_devices_without_memory_are_left_out() -> None:
    problem = table_one(0)
    memory = np.full(20, np.inf)
    memory[[3, 7]] = problem.costs.model[0]
    planned = solve(with_memory(problem, memory))
    assert planned.excluded == (3, 7)
    assert planned.devices == tuple(i for i in range(20) if i not in (3, 7))
    assert planned.problem.num_devices == len(planned.plan.batches) == len(planned.before.cuts) == 18
    assert planned.problem.fleet.flops.tolist() == np.delete(problem.fleet.flops, [3, 7]).tolist()
    assert planned.straggler not in (3, 7)
    assert planned.notes == tuple(
        f"infeasible_memory: device {i} is left out, because it does not hold one sample and the first layer; give it "
        "more memory or samples"
        for i in (3, 7)
    )


def test_no_device_with_memory() -> None:
    problem = table_one(0)
    with pytest.raises(InfeasibleError) as caught:
        solve(with_memory(problem, np.full(20, 1.0)))
    assert caught.value.why == "infeasible_memory"
    assert str(caught.value) == (
        "no device holds one sample and the first layer; give the devices more memory or samples, or cut a smaller "
        "model"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_does_not_fit_is_lowered_before_the_cuts_are_chosen(mode: str) -> None:
    problem = table_one(0)
    memory = np.full(20, 10.5 * problem.costs.held[0] + problem.costs.model[0])
    planned = solve(with_memory(problem, memory), mode=mode)
    assert max(planned.plan.batches) <= 10
    assert planned.seconds < np.inf
    assert start(with_memory(problem, memory), 16).batches == (10,) * 20


def test_no_batch_exceeds_the_samples() -> None:
    planned = solve(replace(table_one(0), samples=np.arange(1, 21)))
    assert all(b <= i + 1 for i, b in enumerate(planned.plan.batches))
    assert planned.plan.batches[0] == 1


def test_everything_at_the_devices() -> None:
    """A server that hardly computes: with the whole model at each device it has no work, and C is 0."""
    problem = table_one(0)
    rates = {name: np.full(20, 1e12) for name in ("fed_up", "fed_down")}
    planned = solve(with_bound(replace(problem, fleet=replace(problem.fleet, server=1e3, **rates)), target=10.0))
    assert set(planned.plan.cuts) == {16}
    assert planned.latency.server_forward == 0.0
    assert planned.seconds < np.inf


@pytest.mark.parametrize("mode", MODES)
def test_without_drift_where_every_step_aggregates(mode: str) -> None:
    planned = solve(replace(uneven(0), interval=1), mode=mode)
    assert planned.problem.drift_rate == 0.0
    assert planned.seconds < planned.problem.seconds(*planned.before)


def test_unlimited_rates_between_the_servers() -> None:
    problem = uneven(0)
    planned = solve(replace(problem, fleet=replace(problem.fleet, server_up=np.inf, server_down=np.inf)))
    assert planned.latency.servers_up == planned.latency.servers_down == 0.0
    assert planned.seconds <= solve(problem).seconds


def test_one_device() -> None:
    planned = solve(table_one(0, 1))
    every = np.array([(b, c) for b in range(1, 60) for c in range(1, 17)])
    assert planned.seconds == pytest.approx(min(planned.problem.seconds([b], [c]) for b, c in every))


def test_an_unknown_mode() -> None:
    with pytest.raises(ConfigError) as caught:
        solve(table_one(0), mode="exact")
    assert str(caught.value) == "mode is 'exact'; it must be 'joint' or 'paper'"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), devices=st.integers(1, 6), layers=st.integers(1, 8), mode=st.sampled_from(MODES))
def test_no_plan_breaks_a_limit(seed: int, devices: int, layers: int, mode: str) -> None:
    problem = at_random(seed, devices, layers)
    problem = replace(problem, samples=np.random.default_rng(seed).integers(0, 40, devices))
    try:
        planned = solve(problem, mode=mode)
    except InfeasibleError as error:
        assert error.why in ("infeasible_eps", "infeasible_memory")
        return
    batches, cuts = (np.array(values)[None] for values in planned.plan)
    assert ratios(planned.problem, batches, cuts)[0] < np.inf  # memory, samples and target, straight from the equations
    assert (batches >= 1).all()
    assert ((cuts >= 1) & (cuts <= layers)).all()
    assert sorted(planned.devices + planned.excluded) == list(range(devices))


# -- the public function ----------------------------------------------------------------------------------------------

DEVICES = Devices(
    clients=(Device(flops=2e12, up=80e6, down=380e6), Device(flops=1e11, up=10e6, down=50e6)), server=20e12
)
BOUND = Bound(beta=50.0, lr=5e-4, noise=np.full(16, 40.0), slope=np.full(16, 0.1), gap=2.3)


def test_plan_takes_a_profile_and_devices() -> None:
    table = profile(vgg16(), (3, 32, 32), optimiser_slots=0)
    planned = plan(table, DEVICES, BOUND, interval=10, samples=[50, 60])
    assert planned.problem.interval == 10
    assert planned.problem.samples is not None
    assert planned.problem.samples.tolist() == [50, 60]
    assert planned.plan == plan(vgg_costs(), DEVICES, BOUND, interval=10, samples=[50, 60]).plan
    assert planned.plan.batches[0] > planned.plan.batches[1]
    assert planned.straggler == 1


def test_plan_logs_its_notes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="cutlayer"):
        planned = plan(vgg_costs(), DEVICES, replace(BOUND, target=1e-9))
    assert caplog.messages == list(planned.notes)
    assert planned.notes[0].startswith("raised_eps: the target 1e-09 is now ")


def test_plan_in_the_papers_mode() -> None:
    found = plan(vgg_costs(), DEVICES, BOUND, mode="paper")
    assert found.plan == solve(found.problem, mode="paper").plan
    assert least(found.problem, [found.plan, found.before]) == found.plan


def test_samples_for_each_device() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(vgg_costs(), DEVICES, BOUND, samples=[50])
    assert str(caught.value) == "samples are given for 1 devices, but there are 2; give one number each"
