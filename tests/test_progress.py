"""Specifies what is shown of a run under way: how far it is, by rounds or by samples, and how long it will take."""

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cutlayer.cli.launch import _without_common_folder
from cutlayer.cli.progress import Bar, Lines, Status, _bars
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


# -- what fits -----------------------------------------------------------------------------------------------------

LONG = ["iid/sfl_v1-cut1-none seed 0", "dirichlet/sfl_v2-cut3-topk-0.1+int8 seed 10"]
LATE = record(30, test_accuracy=0.939, bytes={"up_labels": 44_145_000})


def test_what_matters_less_goes_first_where_there_is_little_room() -> None:
    status = Status(BUDGET, [record(2, test_accuracy=0.5, stopped=1)])
    assert [status.within(room) for room in (66, 57, 45, 30, 5)] == [
        "160/1,000 samples, accuracy 50.0 %, loss 0.500, 10 B, 1 stopped",
        "160/1,000 samples, accuracy 50.0 %, loss 0.500, 1 stopped",
        "160/1,000 samples, accuracy 50.0 %, 1 stopped",
        "accuracy 50.0 %, 1 stopped",
        "accuracy 50.0 %",
    ]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_bar_keeps_the_round_the_metric_and_the_time(columns: int) -> None:
    progress = _bars(Console(file=io.StringIO(), width=columns, force_terminal=True))
    watcher = Bar(progress, LONG)
    for title in LONG:
        watcher.begin(title, Run(rounds=30), [])
        watcher.round(LATE)
    out = io.StringIO()
    Console(file=out, width=columns).print(progress.get_renderable())
    lines = out.getvalue().splitlines()
    assert [len(line) for line in lines] == [columns, columns] and all("━━━" in line for line in lines)
    assert all(" 30/30 accuracy 93.9 %" in line and line.endswith("00:00") for line in lines), lines
    assert [line.partition(" ━")[0].rstrip() for line in lines] == [
        title if len(title) <= columns - 45 else f"…{title[46 - columns :]}" for title in LONG
    ]
    assert [", loss 0.500, 42.1 MiB" in line for line in lines] == [columns > 90] * 2


def test_a_line_in_a_narrow_terminal_is_one_line(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    watcher = Lines(Console(file=out, width=80))
    watcher.begin(LONG[0], Run(rounds=30), [])
    clock[0] += 1
    watcher.round(LATE)
    assert out.getvalue() == "iid/sfl_v1-cut1-none seed 0: round 30/30, accuracy 93.9 %, loss 0.500, 0:00 left\n"


@pytest.mark.parametrize(
    ("titles", "shown"),
    [
        (["a/b/c"], ["a/b/c"]),
        (["a/b seed 0", "a/b seed 1"], ["b seed 0", "b seed 1"]),
        (["s/iid/x", "s/dirichlet/x"], ["iid/x", "dirichlet/x"]),
        (["mine", "mine seed 1"], ["mine", "mine seed 1"]),
    ],
)
def test_titles_leave_out_the_folder_that_they_share(titles: list[str], shown: list[str]) -> None:
    assert _without_common_folder(titles) == shown


# -- the width of messages -----------------------------------------------------------------------------------------

DIVERGES = "run digits --only fedavg --rounds 3 --set clients=4 --set per_round=4 --set optimiser.lr=1e30 --quiet"


def said_to(command: str, folder: Path, columns: int | None, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a command, on a terminal of so many columns or in a pipe."""
    known = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    every = {**known, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}
    ours, theirs = pty.openpty() if columns is not None else os.pipe()
    if columns is not None:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    words = [sys.executable, "-m", "cutlayer", *command.split()]
    process = subprocess.Popen(
        words, cwd=folder, env=every, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs
    )
    os.close(theirs)
    found = b""
    with contextlib.suppress(OSError):  # so a terminal says that the other end is gone
        while part := os.read(ours, 65536):
            found += part
    os.close(ours)
    return process.wait(), found.decode().replace("\r\n", "\n")


def test_messages_are_as_wide_as_the_terminal(tmp_path: Path) -> None:
    code, text = said_to(DIVERGES, tmp_path, 80)
    assert code == 3
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    assert "warning: " in words and "error: digits/fedavg: nobody could train" in words
    for place in ({"columns": 60}, {"columns": None, "COLUMNS": "60"}):
        code, text = said_to("run no/such/file/of/mine.toml", tmp_path, **place)  # type: ignore[arg-type]
        assert code == 2 and max(len(line) for line in text.splitlines()) <= 60
        assert " ".join(text.split()) == (
            "error: there is no configuration file no/such/file/of/mine.toml; check the path"
        )


def test_a_message_in_a_pipe_is_one_line(tmp_path: Path) -> None:
    code, text = said_to(DIVERGES, tmp_path, None)
    assert code == 3
    assert [line.split()[0] for line in text.splitlines()] == ["warning:", "error:"]
    assert min(len(line) for line in text.splitlines()) > 120
