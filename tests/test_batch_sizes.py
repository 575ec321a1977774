"""Specifies the batch sizes for given cuts: Newton's point, its rounding, the paper's step and the joint one."""

from dataclasses import replace

import numpy as np
import pytest
from planning_problems import at_random, ratios, table_one, two_devices, uneven

from cutlayer.errors import InfeasibleError
from cutlayer.planning import batch_sizes
from cutlayer.planning.problem import Floats, Ints, Problem

CUTS = np.array([2, 1])  # of two_devices()
UNREACHABLE = (
    "no batch sizes reach the target 0.1 with these cuts; raise the target, lower the learning rate or the interval, "
    "or give the devices more memory or samples"
)


def cuts_that_fit(problem: Problem, seed: int) -> Ints:
    """Any cuts with which each device holds two samples, or one where there is no such cut."""
    rng = np.random.default_rng(seed)
    deepest = (problem.table.capacity >= 2).sum(axis=1)
    return rng.integers(1, np.maximum(deepest, 1) + 1)


def closed_form(problem: Problem, cuts: Ints, times: batch_sizes.Times) -> Floats:
    """The same point as Newton's: C_i b_i^2 is the same for all of them, and follows from a quadratic equation."""
    terms = batch_sizes._without_free(problem, cuts, times)
    busy = terms.c > 0
    batches = batch_sizes.largest(problem, cuts, times)
    roots = np.sqrt(terms.c[busy])
    half = terms.b * roots.sum()
    batches[busy] = (half + np.sqrt(half**2 + terms.a * terms.b * terms.d)) / terms.a / roots
    return batches


@pytest.mark.parametrize("start", [(1, 1), (16, 16), (200, 200), (1, 200), (0.01, 5000)])
def test_newton_on_numbers_worked_out_by_hand(start: tuple[float, float]) -> None:
    """A = B = 0.1, D = 3, S = 1 + 2: s = (0.3 + sqrt(0.09 + 0.03)) / 0.1 = 6.464102, b = (s, s / 2)."""
    found = batch_sizes.newton_jacobi(two_devices(), CUTS, (1.0, 2.0), np.array(start))
    assert found == pytest.approx([6.464101615, 3.232050808], abs=1e-9)


def test_the_closed_form_on_the_same_numbers() -> None:
    assert closed_form(two_devices(), CUTS, (1.0, 2.0)) == pytest.approx([6.464101615, 3.232050808])


@pytest.mark.parametrize("seed", range(30))
def test_newton_finds_the_closed_form(seed: int) -> None:
    problem = at_random(seed, num_devices=3 + seed)
    cuts = np.minimum(cuts_that_fit(problem, seed), problem.num_layers // 2)  # the default target is in reach
    times = batch_sizes.times_of(problem, cuts, np.full(len(cuts), 16))
    expected = closed_form(problem, cuts, times)
    for start in (1, 16, 200):
        found = batch_sizes.newton_jacobi(problem, cuts, times, np.full(len(cuts), start))
        assert found == pytest.approx(expected, rel=1e-9)


def test_at_the_closed_form_no_batch_pays_to_change() -> None:
    problem, times = two_devices(), (1.0, 2.0)
    best = closed_form(problem, CUTS, times)

    def seconds(b: np.ndarray) -> float:
        return (b @ [1, 4] + sum(times)) / (0.1 - (0.1 / b).sum())

    for change in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
        assert seconds(best) < seconds(best + change)


def test_equal_cuts_have_equal_batches_before_limits() -> None:
    problem = uneven(0)
    cuts = np.full(20, 4)
    found = closed_form(problem, cuts, batch_sizes.times_of(problem, cuts, np.full(20, 16)))
    assert np.ptp(found) == pytest.approx(0, abs=1e-12)


def test_a_device_that_leaves_the_server_no_work_takes_all_it_can() -> None:
    """Cut 3 is the whole model: kappa = min(T3 / 6, T4 / 1) = 4, and A becomes 0.1 - 0.1 / 4 = 0.075 for the other."""
    problem, times = two_devices(), (24.0, 10.0)
    cuts = np.array([3, 1])
    s = (0.1 * 2 + np.sqrt((0.1 * 2) ** 2 + 0.075 * 0.1 * 34)) / 0.075  # S = sqrt(4)
    assert closed_form(problem, cuts, times) == pytest.approx([4, s / 2])
    assert batch_sizes.newton_jacobi(problem, cuts, times, np.ones(2)) == pytest.approx([4, s / 2], rel=1e-9)
    everyone = np.array([3, 3])
    assert batch_sizes.newton_jacobi(problem, everyone, times, np.ones(2)).tolist() == [4.0, 4.0]


def test_kappa_is_the_tightest_of_memory_samples_and_both_times() -> None:
    """A sample takes 5 and 2 there, 1 and 1 back; it holds 2 and 1 bits of gradients."""
    problem = two_devices()
    assert batch_sizes.largest(problem, CUTS, (20.0, 100.0)).tolist() == [4.0, 10.0]
    assert batch_sizes.largest(problem, CUTS, (20.0, 3.0)).tolist() == [3.0, 3.0]
    few = replace(problem, samples=np.array([2, 9]))
    assert batch_sizes.largest(few, CUTS, (20.0, 100.0)).tolist() == [2.0, 9.0]
    small = replace(problem, fleet=replace(problem.fleet, memory=np.array([7.0, 3.0])))
    assert batch_sizes.largest(small, CUTS, (1e3, 1e3)) == pytest.approx([3.5, 3.0], rel=1e-8)


def test_rounding_goes_to_the_better_neighbour_within_the_limits() -> None:
    """Worked out by hand with cuts (2, 1): a sample takes (5, 2) there, (1, 1) back, (1, 4) at the server."""
    problem = replace(two_devices(), bound=replace(two_devices().bound, target=1.0))
    unlimited = np.full(2, 100.0)
    # Others at 3.4: b_0 = 1 costs max(5, 6.8) + 3.4 + 1 + 13.6 = 24.8 over 1 - 0.1 - 0.1/3.4 = 0.8706, that is 28.49;
    # b_0 = 2 costs 10 + 3.4 + 2 + 13.6 = 29 over 0.9206, that is 31.50. With b_0 = 1.5, b_1 = 3 costs 7.5 + 3 + 13.5 =
    # 24 over 0.9 = 26.67 and b_1 = 4 costs 8 + 4 + 17.5 = 29.5 over 0.9083 = 32.48.
    assert batch_sizes.rounded(problem, CUTS, np.array([1.5, 3.4]), unlimited).tolist() == [1, 3]
    assert batch_sizes.rounded(problem, CUTS, np.array([0.2, 7.9]), np.array([5.0, 6.7])).tolist() == [1, 6]
    assert batch_sizes.rounded(problem, CUTS, np.array([3.0, 2.0]), unlimited).tolist() == [3, 2]


def test_rounding_all_down_may_not_miss_the_target() -> None:
    """A = 0.1 = B (1/b_0 + 1/b_1) at b = 2; 2.4 for both leaves headroom, 2 for both leaves none."""
    assert batch_sizes.rounded(two_devices(), CUTS, np.array([2.4, 2.4]), np.full(2, 50.0)).tolist() == [3, 3]


def test_the_papers_step_cannot_lengthen_the_waits() -> None:
    for seed in range(5):
        problem = uneven(seed)
        cuts, batches = np.full(20, 4), np.full(20, 16)
        before = batch_sizes.times_of(problem, cuts, batches)
        found = batch_sizes.times_of(problem, cuts, batch_sizes.paper(problem, cuts, batches))
        assert found[0] <= before[0] * (1 + 1e-9)
        assert found[1] <= before[1] * (1 + 1e-9)


def test_the_papers_step_starts_from_batches_that_reach_the_target() -> None:
    """From b = (2, 2) there is no headroom; T3 = 10 and T4 = 2 leave kappa = (2, 2), and with it nothing."""
    with pytest.raises(InfeasibleError) as caught:
        batch_sizes.paper(two_devices(), CUTS, np.array([2, 2]))
    assert caught.value.why == "infeasible_eps"
    assert str(caught.value) == UNREACHABLE
    # From (1, 10) there is none either, but T3 = 20 and T4 = 10 leave room for the first device to grow.
    found = batch_sizes.paper(two_devices(), CUTS, np.array([1, 10]))
    assert two_devices().headroom(found, CUTS) > 0
    assert found[0] <= 4


def test_the_joint_step_says_when_no_batches_reach_the_target() -> None:
    few = replace(two_devices(), samples=np.array([2, 2]))
    with pytest.raises(InfeasibleError) as caught:
        batch_sizes.joint(few, CUTS)
    assert caught.value.why == "infeasible_eps"
    assert str(caught.value) == UNREACHABLE


def test_the_joint_step_finds_the_best_of_all_batches() -> None:
    """Against all 50^3 batches, whole problems at random."""
    batches = np.stack(np.meshgrid(*[np.arange(1, 51)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
    compared = 0
    for seed in range(40):
        problem = replace(at_random(seed), samples=np.full(3, 50))
        cuts = cuts_that_fit(problem, seed)
        values = ratios(problem, batches, np.broadcast_to(cuts, batches.shape))
        if values.min() < np.inf:
            found = batch_sizes.joint(problem, cuts)
            assert ratios(problem, found[None], cuts[None])[0] == pytest.approx(values.min(), rel=1e-12), seed
            compared += 1
    assert compared >= 25


def test_the_joint_step_is_never_worse_than_the_papers() -> None:
    for seed in range(20):
        problem = uneven(seed)
        cuts = np.random.default_rng(seed).integers(1, 9, 20)
        joint = problem.seconds(batch_sizes.joint(problem, cuts), cuts)
        for start in (8, 16, 64):
            found = batch_sizes.paper(problem, cuts, np.full(20, start))
            assert joint <= problem.seconds(found, cuts)


def test_slow_devices_get_smaller_batches() -> None:
    problem = uneven(0)
    cuts = np.full(20, 4)
    found = batch_sizes.joint(problem, cuts)
    waits = problem.table.at(cuts)
    assert found[(waits.there + waits.back).argmax()] < found[(waits.there + waits.back).argmin()] / 2


def test_like_devices_get_like_batches() -> None:
    found = batch_sizes.joint(table_one(0), np.full(20, 4))
    assert np.ptp(found) <= 2
