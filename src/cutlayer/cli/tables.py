"""Tables for people: runs and the catalogue, and the helper that every table is made with."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from cutlayer.cli.catalogue import Entry
from cutlayer.data import Augment
from cutlayer.results.names import codecs_of
from cutlayer.runs.config import Choice, Run

NONE = "–"
GAP = 2  # blanks beside a column
BROKEN = 16  # characters that a column keeps that may be broken,
NAME = 32  # and one that tells rows apart


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """A table in the house style, which fits the terminal: columns beyond its width continue below.

    Columns are right-aligned and unbroken unless `left` and `fold` name them.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[str] = ()
    fold: Collection[str] = ()
    keys: int = 1  # the first columns, which tell rows apart, are repeated where the table continues
    title: str = ""
    caption: str = ""
    ratios: Mapping[str, int] = field(default_factory=dict)  # how columns that may be broken share the room

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        blocks = self._blocks(options.max_width)
        for number, block in enumerate(blocks):
            yield self._table(block, self.title if number == 0 else "")
        if self.caption:
            yield Text(self.caption, style="table.caption")

    def _blocks(self, room: int) -> list[list[int]]:
        """Return the columns of each part of the table; one that is alone too wide for the room is broken there."""
        keys = list(range(min(self.keys, len(self.heads))))
        blocks = [list(keys)]
        for column in range(len(keys), len(self.heads)):
            if blocks[-1] != keys and self._width([*blocks[-1], column]) > room:
                blocks.append(list(keys))
            blocks[-1].append(column)
        return blocks

    def _width(self, columns: Sequence[int]) -> int:
        return sum(self._narrowest(column) + GAP for column in columns)

    def _narrowest(self, column: int) -> int:
        """Return the width that a column needs."""
        lines = [line for cell in (self.heads[column], *self._cells(column)) for line in cell.split("\n")]
        natural = max(cell_len(line) for line in lines)
        most = NAME if column < self.keys else BROKEN
        return min(natural, most) if self.heads[column] in self.fold else natural

    def _cells(self, column: int) -> list[str]:
        return [row[column] for row in self.rows]

    def _table(self, columns: Sequence[int], title: str) -> Table:
        made = Table(
            title=title or None,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            title_style="bold",
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for column in columns:
            head = self.heads[column]
            made.add_column(
                head,
                justify="left" if head in self.left else "right",
                no_wrap=head not in self.fold,
                overflow="fold",
                ratio=self.ratios.get(head),
            )
        for row in self.rows:
            made.add_row(*(row[column] for column in columns))
        return made


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table, and what is to be said about it."""

    name: str = ""
    sheet: Sheet
    remarks: Sequence[str] = ()
    printed: Sequence[int] | None = None  # the columns that a paper prints; all by default
    bold: str | None = None  # the name of the row whose first value a paper prints in bold


def sections_for_people(sections: Sequence[Section]) -> Group:
    """Return tables with their remarks, and a blank line between them."""
    parts: list[RenderableType] = []
    for section in sections:
        parts += [*([Text()] if parts else []), section.sheet, *map(Text, section.remarks)]
    return Group(*parts)


def plain_table(
    heads: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    left: Collection[str] = (),
    fold: Collection[str] = (),
    keys: int = 1,
    title: str = "",
    caption: str = "",
) -> Sheet:
    """Return a table of anything that can be printed."""
    cells = [list(map(str, row)) for row in rows]
    return Sheet(heads=heads, rows=cells, left=left, fold=fold, keys=keys, title=title, caption=caption)


def dashed(form: str, value: float | None) -> str:
    """Format a number, or return a dash where there is none."""
    return NONE if value is None else form.format(value)


def run_tables(runs: Sequence[Run]) -> Group:
    """Return one table for each panel of runs that have not been trained yet."""
    panels: dict[str, list[Run]] = {}
    for run in runs:
        panels.setdefault(run.name.rpartition("/")[0], []).append(run)
    return Group(*(part for name, some in panels.items() for part in _runs(name, some)))


def _runs(panel: str, runs: Sequence[Run]) -> tuple[RenderableType, ...]:
    """Return a row for each run; settings that all runs share stand below, those that no run has are left out."""
    named: dict[str, list[Run]] = {}
    for run in runs:
        named.setdefault(run.name.rpartition("/")[2], []).append(run)
    rows = [_settings(some[0]) | {"seeds": _seeds(some)} for some in named.values()]
    values = {key: {row[key] for row in rows} for key in rows[0]}
    heads = ["run", *(key for key, found in values.items() if len(found) > 1)]
    shared = [f"{key} {value}" for key, found in values.items() for value in found if len(found) == 1 and value != NONE]
    cells = [[name, *(row[head] for head in heads[1:])] for name, row in zip(named, rows, strict=True)]
    table = plain_table(heads, cells, left=heads, fold=heads)
    title = (Text(panel, style="bold"),) if panel else ()  # a narrow table would break its own title
    return *title, table, Text(f"all runs: {', '.join(shared)}\n")


def _seeds(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.seed) for run in runs) if len(runs) > 1 else NONE


def _settings(run: Run) -> dict[str, str]:
    count, unit = run.batching.steps or run.batching.epochs, "epoch" if run.batching.steps is None else "step"
    return {
        "data": str(run.data),
        "subset": NONE if run.subset == 1 else f"{run.subset:.4g}",
        "augment": _augment(run.augment),
        "partition": _spelled(run.partition),
        "model": _spelled(run.model),
        "weights": run.weights or NONE,
        "cut": str(run.cut),
        "method": _spelled(run.method),
        "codecs": codecs_of(run.codecs) or NONE,
        "optimiser": _spelled(run.optimiser),
        "server optimiser": _spelled(run.server_optimiser),
        "batches": f"of {run.batching.size}, {count} {unit}{'' if count == 1 else 's'}",
        "rounds": str(run.rounds),
        "until samples": dashed("{}", run.until_samples),
        "clients": f"{run.per_round or run.clients} of {run.clients}",
        "devices": _spelled(run.devices),
        "device": run.device,
        "engine": run.engine,
        "precision": run.precision,
    }


def _augment(augment: Augment | None) -> str:
    made = {} if augment is None else {key: value for key, value in asdict(augment).items() if value}
    words = [key if value is True else f"{key}={value}" for key, value in made.items()]
    return f"({', '.join(words)})" if words else NONE


def catalogue_table(kind: str, entries: Sequence[Entry]) -> Sheet:
    """Return the names of one kind; a column that would be empty is left out."""
    columns = {
        "name": [e.name for e in entries],
        "what it is": [e.about for e in entries],
        "source": [] if kind == "recipes" else [e.source for e in entries],  # recipes begin with theirs
        "options": [", ".join([*e.needs, *(f"{k}={_plain(v)}" for k, v in e.options.items())]) for e in entries],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    table = plain_table(list(shown), zip(*shown.values(), strict=True), left=shown, fold=list(shown)[1:], title=kind)
    return replace(table, ratios={head: 3 if head == "what it is" else 2 for head in table.fold})


def _spelled(choice: Choice | None) -> str:
    if choice is None:
        return NONE
    options = ", ".join(f"{k}={_plain(v)}" for k, v in choice.options.items())
    return f"{choice.name}({options})" if options else choice.name


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return _spelled(Choice(value["schedule"], {k: v for k, v in value.items() if k != "schedule"}))
    return value if isinstance(value, str) else repr(value)
