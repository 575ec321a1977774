"""How a run shows that it is under way: a live bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cutlayer.core.text import human_bytes, human_seconds, percent
from cutlayer.runs.config import Run
from cutlayer.runs.training import Record

LINES_PER_RUN = 10
PARTS = 10_000  # of a bar


class RunWatcher(Protocol):
    """Is told how runs go."""

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None: ...

    def round(self, record: Record) -> None: ...


class Status:
    """What is known of a run so far, as words."""

    def __init__(self, run: Run, history: Sequence[Record]) -> None:
        self.run = run
        self.share = Fraction(0)  # of the run that is done: of its rounds or its samples, whichever ends it sooner
        self.place = f"0/{run.rounds}"
        self.accuracy: float | None = None  # stays until it is measured again
        self.loss: float | None = None
        self.bytes = 0
        self.stopped = 0
        for record in history:
            self.add(record)

    def add(self, record: Record) -> None:
        number, samples, budget = record["round"], record["samples"], self.run.until_samples
        self.share, self.place = Fraction(number, self.run.rounds), f"{number}/{self.run.rounds}"
        if budget is not None:
            self.share = max(self.share, min(Fraction(samples, budget), Fraction(1)))
            self.place += f", {samples:,}/{budget:,} samples"
        self.accuracy = record.get("test_accuracy", self.accuracy)
        self.loss = record["loss"]
        self.bytes = sum(record["bytes"].values())
        self.stopped += record["stopped"]

    def __str__(self) -> str:
        loss = "–" if self.loss is None else f"{self.loss:.3f}"
        words = [f"accuracy {percent(self.accuracy)}", f"loss {loss}", human_bytes(self.bytes)]
        return ", ".join([*words, f"{self.stopped} stopped"] if self.stopped else words)


class Silent:
    """Shows nothing."""

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        pass

    def round(self, record: Record) -> None:
        pass


class Lines:
    """A line for every tenth of a run."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        self.title, self.status, self.start = title, Status(run, history), time.perf_counter()
        self.first = self.status.share

    def round(self, record: Record) -> None:
        before = self.status.share
        self.status.add(record)
        share = self.status.share
        if share * LINES_PER_RUN // 1 == before * LINES_PER_RUN // 1:
            return
        left = (time.perf_counter() - self.start) * float((1 - share) / (share - self.first))
        _print(self.console, f"{self.title}: round {self.status.place}, {self.status}, {human_seconds(left)} left")


class Bar:
    """A live bar for each run."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.task = progress, TaskID(-1)

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        self.status = Status(run, history)
        done = int(PARTS * self.status.share)
        self.task = self.progress.add_task(title, completed=done, total=PARTS, place=self.status.place, status="")

    def round(self, record: Record) -> None:
        self.status.add(record)
        done = int(PARTS * self.status.share)
        self.progress.update(self.task, completed=done, place=self.status.place, status=str(self.status))


class _ToConsole(logging.Handler):
    """Log messages above the bar."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        _print(self.console, prefix + record.getMessage())


@contextmanager
def watching(quiet: bool) -> Iterator[RunWatcher]:
    """The watcher that fits where stderr goes; the library's log goes there too."""
    console = Console(stderr=True)
    log, level = logging.getLogger("cutlayer"), logging.WARNING if quiet else logging.INFO
    handler, before = _ToConsole(console, level), log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        if quiet:
            yield Silent()
        elif sys.stderr.isatty():
            with _bars(console) as progress:
                yield Bar(progress)
        else:
            yield Lines(console)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[place]}", markup=False),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
    )


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
