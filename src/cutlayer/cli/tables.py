"""Tables for people: comparisons, model costs and the catalogue."""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from cutlayer.cli.catalogue import Entry
from cutlayer.cli.text import human_bytes, percent
from cutlayer.report import Comparison, Group, Reach, Spread

LOG_WIDTH = 140  # where there is no terminal to measure


def console() -> Console:
    """Where tables go."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else LOG_WIDTH, highlight=False)


def comparison_table(comparison: Comparison) -> Table:
    """One row for each group of runs that differ only in their seed."""
    any_stopped = any(group.stopped for group in comparison.groups)
    table = _table("", caption=_caption(comparison))
    table.add_column("run", overflow="fold", min_width=8)
    heads = ["seeds", "rounds", "best\naccuracy %", "final\naccuracy %", "R", "speed-\nup", "up\nMiB", "down\nMiB"]
    for head in [*heads, "wall\nseconds", *(["stopped"] if any_stopped else [])]:
        table.add_column(head, justify="right", no_wrap=True)
    for group in comparison.groups:
        speed_up = comparison.speed_up(group)
        table.add_row(
            group.label,
            str(len(group.trials)),
            _range(group.rounds),
            _accuracy(group.best),
            _accuracy(group.final),
            _reach(comparison.reach(group)),
            "–" if speed_up is None else f"{speed_up:.2f}×",
            *(_mebibytes(group, direction) for direction in ("up", "down")),
            f"{group.seconds:,.1f}",
            *([str(group.stopped)] if any_stopped else []),
        )
    return table


def cost_tables(costs: dict[str, Any]) -> list[Table]:
    """The costs of each unit, and of both sides where a cut was given."""
    shape = "x".join(str(size) for size in costs["input"])
    title = f"{costs['model']}, one sample of {shape}: {costs['macs'] / 1e6:.2f} M multiply-adds, "
    table = _table(title + f"{costs['params']:,} parameters", caption="O(L): share of the forward pass up to this unit")
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
    table = _table(f"cut {cut['number']}: {crossing}")
    table.add_column("")
    table.add_column("units", overflow="fold")
    for head in ("params", "size", "optimiser\nstate", "work"):
        table.add_column(head, justify="right", no_wrap=True)
    for side in ("client", "server"):
        part = cut[side]
        size = human_bytes(4 * part["params"])
        state = f"{part['optimiser_state']:,}"
        units = ", ".join(part["units"]) or "–"
        table.add_row(side, units, f"{part['params']:,}", size, state, percent(part["share"]))
    return table


def _kind(kind: str, entries: Iterable[Entry]) -> Table:
    table = _table(kind)
    table.add_column("name", no_wrap=True)
    table.add_column("what it is", ratio=3)
    if any(e.options or e.needs for e in entries):
        table.add_column("options", ratio=2, overflow="fold")
    for e in entries:
        table.add_row(e.name, e.about, ", ".join([*e.needs, *(f"{k}={_plain(v)}" for k, v in e.options.items())]))
    return table


def _table(title: str, caption: str = "") -> Table:
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


def _caption(comparison: Comparison) -> str:
    if comparison.target is None:
        return comparison.rule
    target = f"target {100 * comparison.target:.1f} % ({comparison.rule})"
    return f"R: first round that reaches the {target}; speed-up against {comparison.reference.label}"


def _accuracy(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    std = "" if spread.std is None else f" ± {100 * spread.std:.1f}"
    return f"{100 * spread.mean:.1f}{std}"


def _reach(reach: Reach) -> str:
    if reach.mean is None:
        return "never"
    return f"{reach.mean:g}" if reach.by_all else f"{reach.mean:g} ({reach.reached}/{reach.seeds})"


def _mebibytes(group: Group, direction: str) -> str:
    return f"{group.bytes(direction) / 2**20:,.1f}"


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)}–{max(values)}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)
