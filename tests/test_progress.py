"""Specifies what is shown of a run under way: how far it is, by rounds or by samples, and how long it will take."""

import io
import time
from typing import Any

import pytest
from rich.console import Console

from cutlayer.cli.progress import Lines, Status
from cutlayer.runs.config import Run

TWENTY = Run(rounds=20)
BUDGET = Run(rounds=2000, until_samples=1000)


def record(number: int, **more: Any) -> dict[str, Any]:
    """A round of 80 samples."""
    return {"round": number, "loss": 0.5, "stopped": 0, "samples": 80 * number, "bytes": {"up_labels": 10}} | more


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of day, which a test sets."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def shown(run: Run, done: int, last: int, clock: list[float]) -> list[str]:
    """The lines of a run whose rounds take a second each."""
    out = io.StringIO()
    watcher = Lines(Console(file=out, width=200))
    watcher.begin("mine", run, [record(i + 1) for i in range(done)])
    for number in range(done + 1, last + 1):
        clock[0] += 1
        watcher.round(record(number))
    return out.getvalue().splitlines()


def test_a_line_for_every_tenth_of_the_rounds(clock: list[float]) -> None:
    lines = shown(TWENTY, 0, 20, clock)
    assert len(lines) == 10
    assert lines[0] == "mine: round 2/20, accuracy –, loss 0.500, 10 B, 0:18 left"
    assert lines[-1] == "mine: round 20/20, accuracy –, loss 0.500, 10 B, 0:00 left"


def test_a_resumed_run_counts_the_time_since(clock: list[float]) -> None:
    assert shown(TWENTY, 10, 12, clock) == ["mine: round 12/20, accuracy –, loss 0.500, 10 B, 0:08 left"]


def test_samples_count_where_they_end_the_run_sooner(clock: list[float]) -> None:
    lines = shown(BUDGET, 0, 13, clock)
    places = [line.partition("round ")[2].partition(", acc")[0] for line in lines]
    assert places[:2] == ["2/2000, 160/1,000 samples", "3/2000, 240/1,000 samples"]
    assert len(lines) == 10
    assert lines[4].endswith("0:06 left")  # after 7 of 12.5 rounds
    assert lines[-1] == "mine: round 13/2000, 1,040/1,000 samples, accuracy –, loss 0.500, 10 B, 0:00 left"


def test_rounds_count_where_they_end_the_run_sooner() -> None:
    assert Status(Run(rounds=20, until_samples=10**6), [record(5)]).share == 0.25
    assert Status(BUDGET, []).share == 0


def test_the_last_known_accuracy_stays_on_the_line() -> None:
    status = Status(TWENTY, [record(1, test_accuracy=0.5, stopped=1), record(2, stopped=2)])
    assert str(status) == "accuracy 50.0 %, loss 0.500, 10 B, 3 stopped"
