"""The progress of runs: a live bar on a terminal, a line now and then in a log."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cutlayer.cli.show import message, wraps
from cutlayer.core.text import human_bytes, human_seconds
from cutlayer.results.measures import default, measured
from cutlayer.runs.config import Run
from cutlayer.runs.stopping import Record

LINES_PER_RUN = 10
PARTS = 10_000  # of a bar
BESIDE = 8 + 7 + 4  # columns of a short bar, of the time that is left, and between them
STATUS = 26  # columns of a place and a metric


class Status:
    """The state of a run so far, as text."""

    def __init__(self, run: Run, history: Sequence[Record]) -> None:
        self.run = run
        self.share = Fraction(0)  # done so far: of the rounds or of the samples, whichever limit comes first
        self.place = f"0/{run.rounds}"
        self.samples = ""
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
            self.samples = f"{samples:,}/{budget:,} samples"
        if len(measured([record])) > 1:  # not just the loss of training
            self.evaluations = [record]
        self.loss = record["loss"]
        self.bytes = sum(record["bytes"].values())
        self.stopped += record["stopped"]

    def __str__(self) -> str:
        return self.within(None)

    def within(self, room: int | None) -> str:
        """Return what is known in so many characters, without what matters less if there are fewer; None: all of it."""
        words = {
            "samples": self.samples,
            "metric": self._evaluation(),
            "loss": f"loss {'–' if self.loss is None else f'{self.loss:.3f}'}",
            "bytes": human_bytes(self.bytes),
            "stopped": f"{self.stopped} stopped" if self.stopped else "",
        }
        for least in ("bytes", "loss", "samples", "stopped"):
            if room is None or len(_joined(words.values())) <= room:
                break
            del words[least]
        return _joined(words.values())

    def _evaluation(self) -> str:
        """Return the metric that the run would be compared by, as last measured."""
        measure = default([self.evaluations], self.run.metrics)
        value = self.evaluations[-1].get(measure.key) if self.evaluations else None
        return f"{measure.words} {'–' if value is None else measure.told(value)}"


def _joined(words: Iterable[str]) -> str:
    return ", ".join(filter(None, words))


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
        first, last = f"{self.title}: round {self.status.place}, ", f", {human_seconds(left)} left"
        room = self.console.width - len(first) - len(last) if wraps(self.console) else None
        message(self.console, f"{first}{self.status.within(room)}{last}")


class Bar(RunWatcher):
    """Shows a live bar for each run; the longest of all titles sets the room that is left for the rest."""

    def __init__(self, progress: Progress, titles: Sequence[str]) -> None:
        self.progress = progress
        self.longest = max(map(len, titles), default=0)

    def begin(self, title: str, run: Run, history: Sequence[Record]) -> None:
        super().begin(title, run, history)
        self.task = self.progress.add_task(self._short(title), total=PARTS, place="", status="")
        self._show()

    def round(self, record: Record) -> None:
        super().round(record)
        self._show()

    @property
    def _room(self) -> int:
        """The columns of the titles, at most."""
        return max(min(self.longest, self.progress.console.width - BESIDE - STATUS), 2)

    def _short(self, title: str) -> str:
        """Return a title that fits, without its beginning if it is too long."""
        return title if len(title) <= self._room else f"…{title[1 - self._room :]}"

    def _show(self) -> None:
        place = f"{self.status.place:>{2 * len(str(self.status.run.rounds)) + 1}}"
        room = self.progress.console.width - self._room - len(place) - BESIDE
        known = self.status.within(room) if self.status.evaluations or self.status.loss is not None else ""
        done = int(PARTS * self.status.share)
        self.progress.update(self.task, completed=done, place=place, status=known)


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
def telling(console: Console, quiet: bool) -> Iterator[None]:
    """Print the library's log; when quiet, only its warnings."""
    level = logging.WARNING if quiet else logging.INFO
    with logging_to(_ToConsole(console, level), level):
        yield


@contextmanager
def watching(quiet: bool, titles: Sequence[str] = ()) -> Iterator[RunWatcher]:
    """Yield the watcher that fits where stderr goes, of runs of these titles; the library's log goes there, too."""
    console = Console(stderr=True)
    with telling(console, quiet):
        if quiet:
            yield RunWatcher()
        elif sys.stderr.isatty():
            with _bars(console) as progress:
                yield Bar(progress, titles)
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
