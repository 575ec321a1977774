"""Specifies that the benchmarks run, measure what they say, and that memory does not grow with the clients."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[1] / "bench"
METHODS = ["sfl_v1", "fedavg"]

pytestmark = pytest.mark.slow


def quick_rows(script: str) -> list[dict[str, Any]]:
    """The rows of a quick run; a benchmark whose two sides disagree ends with an error instead."""
    command = [sys.executable, BENCH / script, "--quick", "--json"]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows: list[dict[str, Any]] = json.loads(printed)
    return rows


def test_both_sides_of_the_speed_benchmark_train_the_same_model() -> None:
    rows = quick_rows("speed.py")
    assert [row["method"] for row in rows] == METHODS * 5
    for row in rows:
        assert row["difference"] <= 1e-5
        assert row["by hand, ms a step"] > 0
        assert row["cutlayer, ms a step"] > 0
        assert row["met"] == (None if row["bar"] is None else row["ratio"] <= row["bar"])
    assert [row["bar"] for row in rows[::2]] == [1.1, 1.5, 1.5, 0.5, None]
    assert {row["engine"] for row in rows[:6]} == {"loop"}
    assert {row["engine"] for row in rows[6:]} <= {"auto: vmap", "auto: loop"}


def test_memory_is_that_of_the_clients_in_a_round_not_of_all() -> None:
    rows = quick_rows("memory.py")
    assert [(row["method"], row["engine"]) for row in rows] == [(m, e) for m in METHODS for e in ("loop", "vmap")]
    for row in rows:
        assert row["growth with 200, MiB"] > 10  # the models of 100 clients
        assert row["ratio"] <= 1.2
        assert row["ratio of peaks"] <= 1.2


def test_plans_are_timed_with_their_cuts_proven_and_by_descent() -> None:
    rows = quick_rows("plan.py")
    assert [(row["memory"], row["devices"]) for row in rows] == [(m, n) for m in ("enough", "short") for n in (3, 4)]
    for row in rows:
        assert (row["layers"], row["bar, s"], row["met"]) == (16, None, None)
        assert min(row["proven, s"], row["descent, s"]) > 0
        assert row["gap of descent, %"] == pytest.approx(0, abs=1e-4)  # so few devices are no trouble for it


def test_importing_cutlayer_is_timed_against_torch() -> None:
    (row,) = quick_rows("import_time.py")
    assert row["ratio"] == pytest.approx(row["import cutlayer, s"] / row["import torch, s"])
    assert row["met"] == (row["ratio"] <= row["bar"])


def test_refusals_of_nested_headers_are_timed() -> None:
    rows = quick_rows("refusals.py")
    assert [(row["nested"], row["depth"]) for row in rows] == [(k, d) for k in ("lists", "dicts") for d in (100, 10000)]


def test_a_table_is_printed_as_markdown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(BENCH)
    from tables import show

    show([{"case": "a", "ratio": 1.234, "met": True, "difference": 4.2e-8, "bar": None}], as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "| case | ratio | met | difference | bar |",
        "|---|---|---|---|---|",
        "| a | 1.23 | yes | 4e-08 | – |",
    ]
