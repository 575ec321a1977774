"""How a run shows that it is under way: a live bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from cutlayer.cli.text import human_bytes, human_seconds, percent
from cutlayer.training import Record

LINES_PER_RUN = 10


class Watcher(Protocol):
    """Is told how runs go."""

    def begin(self, title: str, done: int, total: int) -> None: ...

    def round(self, record: Record) -> None: ...


class Status:
    """What is known of a run so far, as words."""

    def __init__(self) -> None:
        self.accuracy: float | None = None  # stays until it is measured again
        self.loss: float | None = None
        self.bytes = 0
        self.stopped = 0

    def add(self, record: Record) -> None:
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

    def begin(self, title: str, done: int, total: int) -> None:
        pass

    def round(self, record: Record) -> None:
        pass


class Lines:
    """A line for every tenth of a run."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def begin(self, title: str, done: int, total: int) -> None:
        self.title, self.first, self.total = title, done, total
        self.status, self.start = Status(), time.perf_counter()

    def round(self, record: Record) -> None:
        self.status.add(record)
        number = record["round"]
        if number * LINES_PER_RUN // self.total == (number - 1) * LINES_PER_RUN // self.total:
            return
        left = (time.perf_counter() - self.start) / (number - self.first) * (self.total - number)
        _print(self.console, f"{self.title}: round {number}/{self.total}, {self.status}, {human_seconds(left)} left")


class Bar:
    """A live bar for each run."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.task = progress, TaskID(-1)

    def begin(self, title: str, done: int, total: int) -> None:
        self.status = Status()
        self.task = self.progress.add_task(title, completed=done, total=total, status="")

    def round(self, record: Record) -> None:
        self.status.add(record)
        self.progress.update(self.task, completed=record["round"], status=str(self.status))


class _ToConsole(logging.Handler):
    """Log messages above the bar."""

    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        _print(self.console, prefix + record.getMessage())


@contextmanager
def watching(quiet: bool) -> Iterator[Watcher]:
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
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
    )


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
