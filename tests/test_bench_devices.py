"""Specifies that the benchmarks of real devices run, train the same on both sides, and count what they say."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import flower
import pytest

BENCH = Path(__file__).parents[1] / "bench"

pytestmark = pytest.mark.slow


def quick_rows(script: str) -> list[dict[str, Any]]:
    command = [sys.executable, BENCH / script, "--quick", "--json"]
    limited = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, check=True, env=limited, stdout=subprocess.PIPE, text=True).stdout
    rows: list[dict[str, Any]] = json.loads(printed)
    return rows


def quick_row(script: str) -> dict[str, Any]:
    (row,) = quick_rows(script)
    return row


def test_the_wire_is_timed_against_an_echo_of_the_same_bytes() -> None:
    rows = quick_rows("wire.py")
    assert [(row["there and back"], row["way"]) for row in rows] == [
        (size, way) for size in ("64 KB", "1 MB") for way in ("plain text", "mutual TLS")
    ]
    assert all(row["ratio"] == pytest.approx(row["ms"] / row["TCP, ms"], rel=0.2) for row in rows)


def test_a_step_over_grpc_is_timed_against_the_same_step_on_loop() -> None:
    row = quick_row("devices.py")
    assert row["case"] == "ResNet-18 of width 4, 2 clients, batch 4"
    assert row["difference"] == 0  # both on one thread
    assert row["ratio"] == pytest.approx(row["gRPC, ms a step"] / row["loop, ms a step"])  # of its only turn
    assert (row["bar"], row["met"]) == (1.5, row["ratio"] <= 1.5)
    cut = 4 * 4 * 32 * 32 * 4 / 2**20  # batch, channels, height, width, bytes: up, and its gradient down
    assert 2 * 2 * cut < row["MiB a step"] < 2 * 2 * cut + 0.1  # and in each round the layers of both clients


def test_many_clients_train_the_same_as_on_loop() -> None:
    row = quick_row("many_clients.py")
    assert (row["clients"], row["processes"], row["difference"]) == (6, 2, 0)
    assert row["gRPC, s a round"] > 0
    assert row["loop, s a round"] > 0
    activations = 5 * 8 * 64 * 4  # steps, batch, width, bytes
    labels, layers = 5 * 8 * 8, (64 + 1) * 64 * 4
    assert row["up, KiB a round"] >= 6 * (activations + labels + layers) / 2**10
    assert row["server's peak, MiB"] >= row["server before, MiB"] > 0


def test_our_side_of_the_comparison_with_flower_needs_no_flower() -> None:
    row = quick_row("flower.py")
    assert row["there and back, MiB"] == pytest.approx(4 * (65 * 20 + 21 * 10 + 11 * 10) / 2**20)
    assert row["a round of FedAvg, ms"] > 0
    assert row["Flower, ms an exchange"] is None


def test_the_large_model_of_the_comparison_has_eight_mebibytes() -> None:
    first, second = flower.WIDTHS
    assert 4 * (65 * first + (first + 1) * second + (second + 1) * 10) / 2**20 == pytest.approx(8, abs=0.02)


def test_flower_is_waited_for_no_longer_than_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower, "PATIENCE", 0.0)
    with pytest.raises(SystemExit) as caught:
        flower.wait_for(lambda: False)
    assert caught.value.code == "Flower was not done within 0 seconds"
