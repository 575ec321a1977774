"""The progress of runs: a live bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cutlayer.cli.show import message
from cutlayer.core.text import human_bytes, human_seconds
from cutlayer.results.measures import default, measured
from cutlayer.runs.config import Run
from cutlayer.runs.stopping import Record

LINES_PER_RUN = 10
PARTS = 10_000  # of a bar


class Status:
    """The state of a run so far, as text."""

    def __init__(self, run: Run, history: Sequence[Record]) -> None:
        self.run = run
        self.share = Fraction(0)  # done so far: of the rounds or of the samples, whichever limit comes first
        self.place = f"0/{run.rounds}"
        self.evaluations: list[Record] = []  # the last, if there is one
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
        if len(measured([record])) > 1:  # not just the loss of training
            self.evaluations = [record]
        self.loss = record["loss"]
        self.bytes = sum(record["bytes"].values())
        self.stopped += record["stopped"]

    def __str__(self) -> str:
        loss = "–" if self.loss is None else f"{self.loss:.3f}"
        words = [self._evaluation(), f"loss {loss}", human_bytes(self.bytes)]
        return ", ".join([*words, f"{self.stopped} stopped"] if self.stopped else words)

    def _evaluation(self) -> str:
        """Return the metric that the run would be compared by, as last measured."""
        measure = default([self.evaluations], self.run.metrics)
        value = self.evaluations[-1].get(measure.key) if self.evaluations else None
        return f"{measure.words} {'–' if value is None else measure.told(value)}"


class RunWatcher:
    """Follows runs and shows nothing."""

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        """Start to follow a run, which may have a history."""
        self.title, self.status = title, Status(run, history)

    def round(self, record: Record) -> None:
        """Record a finished round."""
        self.status.add(record)


class Lines(RunWatcher):
    """Prints a line for every tenth of a run."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        super().begin(title, run, history)
        self.first, self.start = self.status.share, time.perf_counter()

    def round(self, record: Record) -> None:
        before = self.status.share
        super().round(record)
        share = self.status.share
        if share * LINES_PER_RUN // 1 == before * LINES_PER_RUN // 1:
            return
        left = (time.perf_counter() - self.start) * float((1 - share) / (share - self.first))
        message(self.console, f"{self.title}: round {self.status.place}, {self.status}, {human_seconds(left)} left")


class Bar(RunWatcher):
    """Shows a live bar for each run."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        super().begin(title, run, history)
        self.task = self.progress.add_task(title, total=PARTS, place="", status="")
        self._show("")

    def round(self, record: Record) -> None:
        super().round(record)
        self._show(str(self.status))

    def _show(self, status: str) -> None:
        done = int(PARTS * self.status.share)
        self.progress.update(self.task, completed=done, place=self.status.place, status=status)


class _ToConsole(logging.Handler):
    """Prints log messages above the bar; a note that several runs share, such as one about their data, only once."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self.console = console
        self.notes: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            message(self.console, f"warning: {text}")
        elif text not in self.notes:
            self.notes.add(text)
            message(self.console, text)


@contextmanager
def logging_to(handler: logging.Handler, level: int = logging.NOTSET) -> Iterator[None]:
    """Send the library's log to a handler, and set the log's level unless it is 0."""
    log = logging.getLogger("cutlayer")
    before = log.level
    log.addHandler(handler)
    log.setLevel(level or before)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def watching(quiet: bool) -> Iterator[RunWatcher]:
    """Yield the watcher that fits where stderr goes; the library's log goes to stderr, too."""
    console, level = Console(stderr=True), logging.WARNING if quiet else logging.INFO
    with logging_to(_ToConsole(console, level), level):
        if quiet:
            yield RunWatcher()
        elif sys.stderr.isatty():
            with _bars(console) as progress:
                yield Bar(progress)
        else:
            yield Lines(console)


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
