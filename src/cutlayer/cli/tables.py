"""Tables for people: runs, model costs and the catalogue."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cutlayer.cli.catalogue import Entry
from cutlayer.core.text import human_bytes, percent
from cutlayer.data import Augment
from cutlayer.runs.config import Choice, Run

NONE = "–"
MOST_UNITS = 6  # named one by one


def run_tables(runs: Sequence[Run]) -> Group:
    """What runs are, before they are trained: a table for each panel."""
    panels: dict[str, list[Run]] = {}
    for run in runs:
        panels.setdefault(run.name.rpartition("/")[0], []).append(run)
    return Group(*(part for name, some in panels.items() for part in _runs(name, some)))


def _runs(panel: str, runs: Sequence[Run]) -> tuple[RenderableType, ...]:
    """A row for each run; what is the same for all of them stands below."""
    rows = _known([_settings(run) for run in runs])
    keys = [key for key in rows[0] if len({row[key] for row in rows}) > 1]
    shared = [f"{key} {value}" for key, value in rows[0].items() if key not in keys]
    table = plain_table("")
    for head in ("run", *keys):
        table.add_column(head, overflow="fold")
    for run, row in zip(runs, rows, strict=True):
        table.add_row(run.name.rpartition("/")[2], *(row[key] for key in keys))
    title = (Text(panel, style="bold"),) if panel else ()  # the table's own would be broken where the table is narrow
    return *title, table, Text(f"all runs: {', '.join(shared)}\n")


def _known(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Without the settings that no run has."""
    keys = [key for key in rows[0] if any(row[key] != NONE for row in rows)]
    return [{key: row[key] for key in keys} for row in rows]


def _settings(run: Run) -> dict[str, str]:
    unit = "epoch" if run.batching.steps is None else "step"
    return {
        "data": run.data,
        "subset": NONE if run.subset == 1 else f"{run.subset:.4g}",
        "augment": NONE if run.augment is None else _augment(run.augment),
        "partition": _spelled(run.partition),
        "model": _spelled(run.model),
        "weights": run.weights or NONE,
        "cut": str(run.cut),
        "method": _spelled(run.method),
        "optimiser": _spelled(run.optimiser),
        "server optimiser": NONE if run.server_optimiser is None else _spelled(run.server_optimiser),
        "batches": f"of {run.batching.size}, {_plural(run.batching.steps or run.batching.epochs, unit)}",
        "rounds": str(run.rounds),
        "until samples": NONE if run.until_samples is None else str(run.until_samples),
        "clients": f"{run.per_round or run.clients} of {run.clients}",
        "devices": NONE if run.devices is None else _spelled(run.devices),
        "device": run.device,
        "engine": run.engine,
        "precision": run.precision,
    }


def _augment(augment: Augment) -> str:
    made = {key: value for key, value in asdict(augment).items() if value}
    words = [key if value is True else f"{key}={value}" for key, value in made.items()]
    return f"({', '.join(words)})" if words else NONE


def cost_tables(costs: dict[str, Any]) -> list[Table]:
    """The costs of each unit, and of both sides where a cut was given."""
    shape = "x".join(str(size) for size in costs["input"])
    title = f"{costs['model']}, one sample of {shape}: {costs['macs'] / 1e6:.2f} M multiply-adds, "
    table = plain_table(
        title + f"{costs['params']:,} parameters", caption="O(L): share of the forward pass up to this unit"
    )
    table.add_column("cut", justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    heads = [
        "forward\nMFLOPs",
        "backward\nMFLOPs",
        "elements\nout",
        "KiB\nout",
        "params",
        "optimiser\nstate",
        "O(L)\n%",
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for unit in costs["units"]:
        table.add_row(
            str(unit["cut"]),
            unit["unit"],
            f"{unit['forward_flops'] / 1e6:.3f}",
            f"{unit['backward_flops'] / 1e6:.3f}",
            f"{unit['activation']:,}",
            f"{unit['activation_bytes'] / 1024:.1f}",
            f"{unit['params']:,}",
            f"{unit['optimiser_state']:,}",
            f"{100 * unit['share']:.1f}",
        )
    return [table, _sides(costs["cut"])] if "cut" in costs else [table]


def catalogue_tables(entries: dict[str, list[Entry]]) -> list[Table]:
    """One table for each kind of name."""
    return [_kind(kind, rows) for kind, rows in entries.items()]


def _sides(cut: dict[str, Any]) -> Table:
    crossing = f"a sample sends {cut['bytes_up']:,} B up (its label too) and {cut['bytes_down']:,} B down"
    table = plain_table(f"cut {cut['number']}: {crossing}")
    table.add_column("")
    table.add_column("units", overflow="fold")
    for head in ("params", "size", "optimiser\nstate", "work"):
        table.add_column(head, justify="right", no_wrap=True)
    for side in ("client", "server"):
        part = cut[side]
        size = human_bytes(4 * part["params"])
        state = f"{part['optimiser_state']:,}"
        table.add_row(side, _units(part["units"]), f"{part['params']:,}", size, state, percent(part["share"]))
    return table


def _units(names: Sequence[str]) -> str:
    """All names, or a range of them where they are many."""
    if len(names) > MOST_UNITS:
        return f"{names[0]} … {names[-1]} ({len(names)} units)"
    return ", ".join(names) or "–"


def _kind(kind: str, entries: Sequence[Entry]) -> Table:
    table = plain_table(kind)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", ratio=3)
    columns = {
        "source": [e.source for e in entries],
        "options": [", ".join([*e.needs, *(f"{k}={_plain(v)}" for k, v in e.options.items())]) for e in entries],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    for head in shown:
        table.add_column(head, ratio=2, overflow="fold")
    for i, e in enumerate(entries):
        table.add_row(e.name, e.about, *(cells[i] for cells in shown.values()))
    return table


def plain_table(title: str, caption: str = "") -> Table:
    """An empty table in the house style."""
    return Table(
        title=title or None,
        caption=caption or None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _spelled(choice: Choice) -> str:
    options = ", ".join(f"{k}={_plain(v)}" for k, v in choice.options.items())
    return f"{choice.name}({options})" if options else choice.name


def _plural(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return _spelled(Choice(value["schedule"], {k: v for k, v in value.items() if k != "schedule"}))
    return value if isinstance(value, str) else repr(value)
