"""What is measured of learning curves, with numbers worked out by hand."""

from pathlib import Path

import curves
import pytest

from cutlayer.results.trials import Group, Trial
from cutlayer.runs.config import Run


def trial(accuracies: list[float | None], seed: int = 0) -> Trial:
    history = [
        {"round": number, "samples": number} | ({} if accuracy is None else {"test_accuracy": accuracy})
        for number, accuracy in enumerate(accuracies, start=1)
    ]
    return Trial(path=Path("somewhere"), run=Run(seed=seed), history=history, times={})


def group(*accuracies: list[float | None]) -> Group:
    return Group(label="a", trials=tuple(trial(each, seed) for seed, each in enumerate(accuracies)))


@pytest.mark.parametrize(
    ("rounds", "shown"),
    [(1, ["1"]), (8, ["1–2", "3–4", "5–6", "7–8"]), (101, ["1–20", "21–40", "41–60", "61–80", "81–100"])],
)
def test_windows_are_equal_round_and_few(rounds: int, shown: list[str]) -> None:
    assert [str(window) for window in curves.windows(rounds)] == [f"rounds {each}" for each in shown]


def test_windows_of_samples() -> None:
    *_, last = curves.windows(160_000, "samples")
    assert str(last) == "samples 120,001–150,000"
    long = trial([0.1, 0.5, 0.7])  # a sample a round
    assert curves.inside(long, curves.Window(2, 3, "samples")) == pytest.approx([50.0, 70.0])
    assert curves.inside(long, curves.Window(3, 4, "samples")) == []


def test_windows_are_of_what_two_seeds_have() -> None:
    def last(*groups: Group) -> str:
        return str(curves.common_windows(groups)[-1])

    assert last(group([0.5] * 60, [0.5] * 30, [0.5] * 30)) == "rounds 26–30"
    assert last(group([0.5] * 60)) == "rounds 51–60"
    assert last(group([0.5] * 60, [0.5] * 12), group([0.5] * 20)) == "rounds 16–20"


def test_a_level_is_a_mean_over_rounds_and_seeds_with_both_scatters() -> None:
    window = curves.Window(2, 3)
    level = curves.level(group([0.9, 0.4, 0.6], [0.0, 0.5, 0.5, 1.0]), window)
    assert level.over_seeds.mean == pytest.approx(50)  # both seeds have 50
    assert level.over_seeds.std == pytest.approx(0)
    assert level.rounds_scatter == pytest.approx(5 * 2**0.5)  # the mean of sqrt(200) and 0
    assert level.seeds == 2
    alone = curves.level(group([0.9, 0.4, 0.6], [0.0, 0.5]), window)  # the second has not come so far
    assert (alone.seeds, alone.over_seeds.std) == (1, None)
    assert curves.level(group([0.9, 0.4]), window) is None
    assert curves.level(group([0.9, None, None]), window) is None  # nothing was measured
    assert curves.level(group([None, None, 0.7]), window).rounds_scatter is None


def test_a_gain_is_of_the_seeds_that_both_have_and_of_two_at_least() -> None:
    window = curves.Window(1, 2)
    ours, base = group([0.5, 0.7], [0.6, 0.6], [0.9, 0.9]), group([0.4, 0.6], [0.3, 0.5], [0.1])
    gain = curves.gain(ours, base, window)
    assert gain.over_seeds.mean == pytest.approx(15)  # 10 and 20; the third has no window in the base
    assert gain.over_seeds.std == pytest.approx(50**0.5)
    assert gain.seeds == 2
    assert curves.gain(group([0.5, 0.7]), base, window) is None
    assert curves.gain(ours, group([0.4, 0.6]), window) is None


def test_a_mean_curve_is_over_the_seeds_that_measured_a_round() -> None:
    trials = group([0.1, 0.3, 0.5], [0.3, None, 0.7, 0.9]).trials
    assert curves.mean_curve(trials) == pytest.approx({1: 20.0, 2: 30.0, 3: 60.0, 4: 90.0})
    assert curves.mean_curve(trials, least=2) == pytest.approx({1: 20.0, 3: 60.0})


def test_a_speed_up_is_of_the_seeds_that_both_have() -> None:
    slow, fast = [0.1] * 30 + [0.6] * 10, [0.1] * 10 + [0.6] * 10  # means of ten rounds are 50 % after eight
    assert curves.speed_up(group(fast, fast), group(slow, slow), 50.0) == 38 / 18
    assert curves.speed_up(group(fast), group(slow, slow), 50.0) is None
    other = Group(label="b", trials=tuple(trial(slow, seed) for seed in (2, 3)))
    assert curves.speed_up(group(fast, fast), other, 50.0) is None
    assert curves.speed_up(group(fast, fast), group(slow, slow[:31]), 50.0) is None  # one seed alone arrives


def test_one_high_round_is_no_arrival_of_the_smoothed_curve() -> None:
    points = dict.fromkeys(range(1, 21), 60.0) | {5: 80.0} | dict.fromkeys(range(21, 41), 90.0)
    assert curves.arrival(points, 70.0) == 5
    smoothed = curves.smoothed(points)
    assert (min(smoothed), smoothed[10], smoothed[15]) == (10, 62.0, 60.0)  # rounds 1 to 10 with one of 80
    assert curves.arrival(smoothed, 70.0) == 24  # four rounds of 90 and six of 60 make 72
    assert curves.arrival(smoothed, 95.0) is None
    assert curves.smoothed({1: 99.0}) == {}


@pytest.mark.parametrize(
    ("gains", "told"),
    [
        ([3.0, 3.2], True),  # 3.1 ± 0.14; t is 12.7 for two seeds: an interval of ± 1.27
        ([1.1, 4.4], False),  # 2.75 ± 2.33: ± 21
        ([1.1, 4.4, 2.7], False),  # 2.73 ± 1.65; t is 4.3: ± 4.1
        ([2.5, 3.0, 2.75], True),  # 2.75 ± 0.25: ± 0.62
    ],
)
def test_few_seeds_make_little_significant(gains: list[float], told: bool) -> None:
    ours, base = group(*([0.5 + gain / 100] for gain in gains)), group(*([0.5] for _ in gains))
    found = curves.gain(ours, base, curves.Window(1, 1))
    assert found.over_seeds.mean == pytest.approx(sum(gains) / len(gains))
    assert found.is_significant(1) is told
    assert not found.is_significant(10**9)  # of so many tests one finds as much by chance
