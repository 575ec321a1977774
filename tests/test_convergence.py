"""When a run has converged, by a rule on the accuracies alone; and runs that end there."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cutlayer.core.batches import Batching
from cutlayer.runs import run as running
from cutlayer.runs.config import Choice, Run
from cutlayer.runs.convergence import Converged, accuracies, converged
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import execute
from cutlayer.runs.training import Training


def by_round(*values: float) -> dict[int, float]:
    return dict(enumerate(values, start=1))


def test_the_first_evaluation_with_five_idle_successors() -> None:
    found = by_round(0.1, 0.5, 0.6, 0.55, 0.6, 0.58, 0.59, 0.6, 0.9, 0.9)
    assert converged(found) == Converged(3, 0.6)  # rounds 4 to 8 gain nothing; what comes later does not count
    assert converged(by_round(0.1, 0.5, 0.6, 0.55, 0.6, 0.58, 0.59)) is None  # only four follow


def test_gains_of_five_evaluations_add_up() -> None:
    steps = [0.5 + 0.00004 * k for k in range(12)]  # 0.02 points in five: not less than that
    assert converged(by_round(*steps)) is None
    slower = [0.5 + 0.000039 * k for k in range(12)]
    assert converged(by_round(*slower)) == Converged(1, 0.5)


@pytest.mark.parametrize(("gain", "expected"), [(0.0001, Converged(1, 0.7113)), (0.0002, None)])
def test_one_sample_of_ten_thousand_is_idle_and_two_are_not(gain: float, expected: Converged | None) -> None:
    """0.7115 - 0.7113 is a little less than 0.0002 in floating point."""
    assert converged(by_round(0.7113, *[0.7] * 4, round(0.7113 + gain, 4))) == expected


def test_the_best_counts_and_not_the_latest() -> None:
    assert converged(by_round(0.6, 0.1, 0.2, 0.3, 0.4, 0.5)) == Converged(1, 0.6)


def test_evaluations_count_and_not_rounds() -> None:
    found = {10 * k: 0.5 for k in range(1, 7)}
    assert converged(found) == Converged(10, 0.5)
    assert converged({}) is None
    history: list[dict[str, Any]] = [{"round": 1}, {"round": 2, "test_accuracy": 0.4}]
    assert accuracies(history) == {2: 0.4}


STILL = Run(  # it learns nothing, and has converged after the first of six rounds
    data="digits",
    subset=0.02,
    clients=2,
    partition=Choice("iid"),
    model=Choice("mlp", {"hidden": (4,)}),
    optimiser=Choice("sgd", {"lr": 1e-9}),
    batching=Batching(size=4),
    rounds=9,
    until_converged=True,
    checkpoint_every=4,
    engine="loop",
)


def rounds_of(folder: Folder) -> list[int]:
    return [record["round"] for record in folder.history()]


def test_a_run_ends_where_its_convergence_shows(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    training = execute(STILL, folder)
    assert (training.state.round, rounds_of(folder)) == (6, [1, 2, 3, 4, 5, 6])
    assert max(folder.store.rounds()) == 6  # committed, though checkpoints are due every fourth round
    assert folder.model.exists() and json.loads(folder.ledger.read_text())


def test_a_run_ends_where_its_accuracy_is_high_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, short = Folder(tmp_path / "whole"), Folder(tmp_path / "short")
    run = replace(STILL, optimiser=Choice("sgd", {"lr": 0.05}), subset=0.2, until_converged=False, rounds=6)
    execute(run, whole)
    found = [record["test_accuracy"] for record in whole.history()]
    goal = next(accuracy for accuracy in found if accuracy > found[0])
    first = found.index(goal) + 1
    assert 1 < first < 6
    with caplog.at_level(logging.INFO, "cutlayer"):
        execute(replace(run, until_accuracy=goal), short)
    assert caplog.messages == [f"{short.path}: ended at round {first}: until_accuracy {goal:g} reached"]
    assert rounds_of(short) == list(range(1, first + 1)) and short.store.rounds()[-1] == first
    assert whole.metrics.read_bytes().startswith(short.metrics.read_bytes())


def test_by_default_all_rounds_are_trained(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run")
    execute(replace(STILL, until_converged=False), folder)
    assert len(rounds_of(folder)) == 9


def test_a_converged_run_that_goes_on_is_done(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Folder(tmp_path / "run")
    caplog.set_level(logging.INFO, "cutlayer")
    execute(STILL, folder)
    metrics, last = folder.metrics.read_bytes(), rounds_of(folder)[-1]
    execute(STILL, folder, resume=True)
    assert caplog.messages == [
        f"{folder.path}: ended at round {last}: until_converged: the last evaluations gained next to nothing",
        f"{folder.path}: it stopped early and is done already",
    ]
    assert folder.metrics.read_bytes() == metrics


def test_a_run_that_was_stopped_ends_in_the_same_round(tmp_path: Path) -> None:
    whole, stopped = Folder(tmp_path / "whole"), Folder(tmp_path / "stopped")
    execute(STILL, whole)

    def stop(training: Training, record: running.Record) -> None:
        if record["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(STILL, stopped, on_round=stop)
    execute(STILL, stopped, resume=True)
    assert stopped.metrics.read_bytes() == whole.metrics.read_bytes()


def test_a_converged_run_goes_on_when_it_need_not_end_there(tmp_path: Path) -> None:
    whole, continued = Folder(tmp_path / "whole"), Folder(tmp_path / "continued")
    execute(replace(STILL, until_converged=False), whole)
    execute(STILL, continued)
    execute(replace(STILL, until_converged=False), continued, resume=True)
    assert continued.metrics.read_bytes() == whole.metrics.read_bytes()
