"""Specifies that the benchmark of the fusion runs, times whole steps, and sees when nothing is fused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fusion
import pytest

BENCH = Path(__file__).parents[1] / "bench"


def test_smofi_is_timed_against_sfl_v1() -> None:
    limited = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, BENCH / "fusion.py", "--quick", "--json"]
    printed = subprocess.run(command, check=True, env=limited, stdout=subprocess.PIPE, text=True).stdout
    (row,) = json.loads(printed)
    assert row["case"] == "ResNet-18 of width 4, 3 clients, batch 4"
    assert row["ratio"] == pytest.approx(row["smofi, ms a step"] / row["sfl_v1, ms a step"])  # of its only turn
    assert row["sfl_v1, ms a step"] > 0
    assert row["difference"] > 0
    assert (row["bar"], row["met"]) == (1.1, row["ratio"] <= 1.1)


def test_a_method_that_fuses_nothing_is_not_timed() -> None:
    with pytest.raises(SystemExit) as caught:
        fusion.compare(fusion.QUICK, "sfl_v1")
    assert caught.value.code == (
        "ResNet-18 of width 4, 3 clients, batch 4: the models of sfl_v1 and sfl_v1 do not differ, so nothing was fused"
    )


def test_every_client_takes_every_step_and_each_step_ends_once() -> None:
    side = fusion.Side(fusion.QUICK, "sfl_v1", sync="step")
    assert side.turn() > 0
    assert len(side._ends) == 4
    assert side._simulation.ledger.samples == 4 * 3 * 4  # steps, clients, batch


def test_inner_steps_leave_out_the_first_and_the_last() -> None:
    assert fusion.inner_steps([10.0, 11.0, 13.0, 17.0, 30.0]) == [1.0, 2.0, 4.0]


def test_the_sides_take_turns_to_begin() -> None:
    said: list[str] = []

    def one() -> float:
        said.append("one")
        return 1.0

    def other() -> float:
        said.append("other")
        return 2.0

    assert fusion.in_turn(one, other, swapped=False) == fusion.in_turn(one, other, swapped=True) == (1.0, 2.0)
    assert said == ["one", "other", "other", "one"]
