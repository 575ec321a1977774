"""The status of a server of real devices: a live table on a terminal, plain lines elsewhere."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cutlayer.core.text import human_bytes, human_seconds, percent, printable
from cutlayer.remote.monitor import status
from cutlayer.remote.monitor.logs import MOST_OF_A_MESSAGE
from cutlayer.remote.monitor.status import STATES, Board, ClientStatus, RunStatus, State

PER_SECOND = 2
OTHER_LINES = 6  # two for the run, two for the table's head, one for the clients that are not shown, one for the cursor
STYLES: dict[State, str] = {
    "away": "dim",
    "joined": "cyan",
    "training": "green",
    "waiting": "blue",
    "slow": "yellow",
    "lost": "red",
    "refused": "bold red",
    "done": "dim green",
}
UNWELL = ("refused", "lost", "slow")  # shown first
IDLE = ("away", "done")  # shown last


@dataclass(frozen=True)
class Column:
    """A fact about each client; its width stays the same as long as the table is shown."""

    head: str
    width: int
    word: Callable[[ClientStatus], str]
    number: bool = False
    style: Callable[[ClientStatus], str] = lambda client: ""


COLUMNS = (
    Column("#", 4, lambda c: str(c.number), number=True),
    Column("name", 14, lambda c: c.name),
    Column("state", 8, lambda c: c.state, style=lambda c: STYLES[c.state]),
    Column("samples", 7, lambda c: str(c.samples), number=True),
    Column("step", 5, lambda c: str(c.step), number=True),
    Column("up", 10, lambda c: human_bytes(c.bytes_up), number=True),
    Column("down", 10, lambda c: human_bytes(c.bytes_down), number=True),
    Column("trips", 6, lambda c: str(c.round_trips), number=True),
    Column("lag", 7, lambda c: "–" if c.lag is None else _seconds(c.lag), number=True),
    Column("last", 7, lambda c: _seconds(c.last_seconds), number=True),
    Column("reason", 15, lambda c: c.reason, style=lambda c: "" if c.state in UNWELL else "dim"),
)
LEAST_FIRST = ("trips", "last", "samples", "step", "down", "up", "lag", "reason")


class LiveTable(ExitStack):
    """Shows the board while it is entered, with the library's log above it; without a terminal, only the log."""

    def __init__(self, board: Board, console: Console) -> None:
        super().__init__()
        self.board, self.console = board, console

    def __enter__(self) -> Self:
        log = logging.getLogger("cutlayer")
        handler = _Above(self.console)
        self.callback(log.setLevel, log.level)
        self.callback(log.removeHandler, handler)
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        if self.console.is_terminal:
            # The table shows what the board logs, except for warnings.
            handler.addFilter(lambda r: r.name != status.log.name or r.levelno >= logging.WARNING)
            self.enter_context(Live(get_renderable=self.render, console=self.console, refresh_per_second=PER_SECOND))
        return self

    def render(self) -> Group:
        """Return the run and its clients as they are now, cut to the size of the console."""
        run = self.board.snapshot()
        clients = sorted(run.clients.values(), key=lambda c: (c.state not in UNWELL, c.state in IDLE, c.number))
        room = max(self.console.height - OTHER_LINES, 1)
        others = (_line(_others(clients[room:])),) if clients[room:] else ()
        return Group(*_heading(run), _table(clients[:room], self.console.width), *others)


class _Above(logging.Handler):
    """Prints log messages as lines, above the table if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        text = prefix + printable(record.getMessage(), MOST_OF_A_MESSAGE)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _heading(run: RunStatus) -> tuple[Text, Text]:
    """Return two lines: where the run is, and its results so far."""
    where = f"round {run.round} of {run.rounds}, step {run.step}" if run.round else f"listening at {run.listening}"
    where = f"{where}, {run.waiting}" if run.waiting else where
    loss = "–" if run.loss is None else f"{run.loss:.3f}"
    known = [f"loss {loss}", f"accuracy {percent(run.accuracy)}"]
    known += [f"{human_bytes(run.bytes_up)} up", f"{human_bytes(run.bytes_down)} down"]
    known += [f"connections refused: {run.refused_connections}"] if run.refused_connections else []
    known += [f"handshakes failed: {run.failed_handshakes}"] if run.failed_handshakes else []
    first = _line(f"{run.name}, {run.method}: {where}, {human_seconds(run.elapsed)}", "bold")
    return first, _line(", ".join(known))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


def _table(clients: Sequence[ClientStatus], width: int) -> Table:
    columns = _fitting(width)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, expand=True)
    for column in columns:
        grows = column.head == columns[-1].head
        table.add_column(
            column.head,
            justify="right" if column.number else "left",
            no_wrap=True,
            overflow="ellipsis",
            width=None if grows else column.width,
            ratio=1 if grows else None,
        )
    for client in clients:
        # A Text reads no markup in what a client calls itself.
        table.add_row(*(Text(column.word(client), column.style(client)) for column in columns))
    return table


def _fitting(width: int) -> list[Column]:
    """Return the columns that fit into this width; those that matter least are dropped first."""
    columns = list(COLUMNS)
    for head in LEAST_FIRST:
        if sum(column.width + 1 for column in columns) - 1 <= width:
            break
        columns = [column for column in columns if column.head != head]
    return columns


def _others(clients: Sequence[ClientStatus]) -> str:
    counts = Counter(client.state for client in clients)
    return f"… and {len(clients)} more: " + ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s])


def _seconds(seconds: float) -> str:
    """Format a duration: up to 59.9 s, then as 1:00."""
    return f"{seconds:.1f} s" if seconds < 59.95 else human_seconds(seconds)
