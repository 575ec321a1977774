"""Tables for people: runs and the catalogue, and the helper that every table is made with."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cutlayer.cli.catalogue import Entry
from cutlayer.data import Augment
from cutlayer.runs.config import Choice, Run

NONE = "–"


def plain_table(
    heads: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    left: Collection[str] = (),
    fold: Collection[str] = (),
    title: str = "",
    caption: str = "",
) -> Table:
    """Return a table in the house style; columns are right-aligned and unbroken unless `left` and `fold` name them."""
    made = Table(
        title=title or None,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for head in heads:
        broken = head in fold
        made.add_column(
            head,
            justify="left" if head in left else "right",
            no_wrap=not broken,
            overflow="fold" if broken else "ellipsis",
        )
    for row in rows:
        made.add_row(*map(str, row))
    return made


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
    rows = [_settings(run) for run in runs]
    values = {key: {row[key] for row in rows} for key in rows[0]}
    heads = ["run", *(key for key, found in values.items() if len(found) > 1)]
    shared = [f"{key} {value}" for key, found in values.items() for value in found if len(found) == 1 and value != NONE]
    named = [{"run": run.name.rpartition("/")[2], **row} for run, row in zip(runs, rows, strict=True)]
    table = plain_table(heads, [[row[head] for head in heads] for row in named], left=heads, fold=heads)
    title = (Text(panel, style="bold"),) if panel else ()  # a narrow table would break its own title
    return *title, table, Text(f"all runs: {', '.join(shared)}\n")


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


def catalogue_table(kind: str, entries: Sequence[Entry]) -> Table:
    """Return the names of one kind; a column that would be empty is left out."""
    columns = {
        "name": [e.name for e in entries],
        "what it is": [e.about for e in entries],
        "source": [e.source for e in entries],
        "options": [", ".join([*e.needs, *(f"{k}={_plain(v)}" for k, v in e.options.items())]) for e in entries],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    table = plain_table(list(shown), zip(*shown.values(), strict=True), left=shown, fold=list(shown)[1:], title=kind)
    for column in table.columns[1:]:
        column.ratio = 3 if column.header == "what it is" else 2
    return table


def _spelled(choice: Choice | None) -> str:
    if choice is None:
        return NONE
    options = ", ".join(f"{k}={_plain(v)}" for k, v in choice.options.items())
    return f"{choice.name}({options})" if options else choice.name


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return _spelled(Choice(value["schedule"], {k: v for k, v in value.items() if k != "schedule"}))
    return value if isinstance(value, str) else repr(value)
