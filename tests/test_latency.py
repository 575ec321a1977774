"""Specifies the latency of a round and the time until the target, on numbers worked out by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cutlayer.errors import ConfigError
from cutlayer.planning.problem import Bound, Costs, Fleet, Problem

CUTS, BATCHES = (1, 2, 1), (2, 3, 4)


@pytest.fixture
def problem() -> Problem:
    return Problem(
        costs=Costs(
            forward=np.array([10.0, 30.0, 60.0]),
            backward=np.array([20.0, 60.0, 120.0]),
            up=np.array([8.0, 4.0, 2.0]),
            down=np.array([6.0, 3.0, 1.0]),
            model=np.array([12.0, 36.0, 96.0]),
            state=np.array([1.0, 2.0, 3.0]),
        ),
        fleet=Fleet(
            flops=np.array([10.0, 20.0, 5.0]),
            up=np.array([4.0, 2.0, 1.0]),
            down=np.array([8.0, 4.0, 2.0]),
            fed_up=np.array([6.0, 3.0, 2.0]),
            fed_down=np.array([12.0, 6.0, 4.0]),
            memory=np.array([41.1, 101.1, np.inf]),
            server=50.0,
            server_up=10.0,
            server_down=20.0,
        ),
        bound=Bound(
            beta=0.5,
            lr=0.1,
            noise=np.array([1.0, 2.0, 3.0]),
            slope=np.array([0.5, 0.25, 0.25]),
            gap=2.0,
            target=2.0,
        ),
        interval=15,
    )


def test_each_term_of_a_round(problem: Problem) -> None:
    latency = problem.latency(BATCHES, CUTS)
    assert latency.forward.tolist() == [2.0, 4.5, 8.0]  # 2*10/10, 3*30/20, 4*10/5
    assert latency.up.tolist() == [4.0, 6.0, 32.0]  # 2*8/4, 3*4/2, 4*8/1
    assert latency.server_forward == pytest.approx(7.8)  # (2*50 + 3*30 + 4*50) / 50
    assert latency.server_backward == pytest.approx(15.6)  # (2*100 + 3*60 + 4*100) / 50
    assert latency.down.tolist() == [1.5, 2.25, 12.0]  # 2*6/8, 3*3/4, 4*6/2
    assert latency.backward.tolist() == [4.0, 9.0, 16.0]  # 2*20/10, 3*60/20, 4*20/5
    assert latency.model_up.tolist() == [2.0, 12.0, 6.0]  # 12/6, 36/3, 12/2
    assert latency.servers_up == pytest.approx(4.8)  # (3*36 - (12+36+12)) / 10
    assert latency.model_down.tolist() == [1.0, 6.0, 3.0]  # 12/12, 36/6, 12/4
    assert latency.servers_down == pytest.approx(2.4)  # 48 / 20


def test_the_slowest_there_and_the_slowest_back(problem: Problem) -> None:
    latency = problem.latency(BATCHES, CUTS)
    assert latency.split == pytest.approx(91.4)  # max(6, 10.5, 40) + 7.8 + 15.6 + max(5.5, 11.25, 28)
    assert latency.aggregation == pytest.approx(18.0)  # max(12, 4.8) + max(6, 2.4)
    assert latency.own.tolist() == [11.5, 21.75, 68.0]
    assert latency.straggler == 2
    assert problem.seconds_per_round(BATCHES, CUTS) == pytest.approx(92.6)  # 91.4 + 18/15


def test_the_server_may_be_the_slowest_in_an_aggregation(problem: Problem) -> None:
    slow = replace(problem, fleet=replace(problem.fleet, server_up=2.0, server_down=3.0))
    assert slow.latency(BATCHES, CUTS).aggregation == pytest.approx(40.0)  # max(12, 48/2) + max(6, 48/3)


def test_equal_cuts_leave_the_servers_nothing_to_exchange(problem: Problem) -> None:
    latency = problem.latency(BATCHES, (2, 2, 2))
    assert (latency.servers_up, latency.servers_down) == (0.0, 0.0)


def test_the_whole_model_at_the_devices_leaves_the_server_no_work(problem: Problem) -> None:
    latency = problem.latency(BATCHES, (3, 3, 3))
    assert (latency.server_forward, latency.server_backward) == (0.0, 0.0)


def test_rounds_and_seconds_until_the_target(problem: Problem) -> None:
    assert problem.noise_rate == pytest.approx(1 / 30)  # 0.5*0.1/9 * 6
    assert problem.drift_rate == pytest.approx(2.25)  # 4 * (0.5*0.1*15)^2
    # 2 - (1/30) (1/2 + 1/3 + 1/4) - 2.25 * 0.75 = 2 - 13/360 - 27/16 = 199/720
    assert problem.headroom(BATCHES, CUTS) == pytest.approx(199 / 720)
    assert problem.rounds(BATCHES, CUTS) == pytest.approx(40 * 720 / 199)  # 2*2 / (0.1 * 199/720)
    assert problem.seconds((2, 3, 3), CUTS) == pytest.approx(
        problem.rounds((2, 3, 3), CUTS) * problem.seconds_per_round((2, 3, 3), CUTS)
    )


def test_memory_bounds_the_batch(problem: Problem) -> None:
    # held is cumulative: 8+6 = 14 a sample with one layer, 14+7 = 21 with two
    assert problem.capacity((1, 2, 1)) == pytest.approx([28.1 / 14, 63.1 / 21, 2**31])  # (41.1-12-1), (101.1-36-2)
    assert problem.seconds((2, 3, 9), CUTS) < np.inf
    assert problem.seconds((3, 3, 9), CUTS) == np.inf
    assert problem.seconds((2, 4, 9), CUTS) == np.inf


def test_a_plan_that_misses_the_target_takes_for_ever(problem: Problem) -> None:
    assert problem.rounds(BATCHES, (3, 2, 1)) == np.inf  # 2.25 * 1 is above the target


def test_without_drift_where_every_step_aggregates(problem: Problem) -> None:
    assert replace(problem, interval=1).drift_rate == 0.0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"beta": np.nan}, "beta of a bound is nan, but it must be a number above 0."),
        ({"lr": -0.1}, "lr of a bound is -0.1, but it must be a number above 0."),
        ({"gap": 0.0}, "gap of a bound is 0.0, but it must be a number above 0."),
        ({"target": np.inf}, "the target of a bound is inf, but it must be a number above 0."),
        (
            {"noise": [1.0, -1.0, 0.0]},
            "noise of a bound is [1.0, -1.0, 0.0], but it must be a number from 0 up for each layer.",
        ),
        ({"slope": 2.0}, "slope of a bound is 2.0, but it must be a number from 0 up for each layer."),
    ],
)
def test_a_bound_of_numbers_that_make_no_sense(problem: Problem, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(problem.bound, **changes)
    assert str(caught.value) == told


def test_a_problem_of_numbers_that_make_no_sense(problem: Problem) -> None:
    for changes, told in (
        ({"interval": 1.5}, "interval is 1.5, but it must be a whole number from 1 up."),
        ({"least": 0}, "least is 0, but it must be a whole number from 1 up."),
        ({"samples": np.array([3, -1, 2])}, "a device has -1 samples; give a number from 0 up for each device"),
    ):
        with pytest.raises(ConfigError) as caught:
            replace(problem, **changes)  # type: ignore[arg-type]
        assert str(caught.value) == told
