"""The bytes that clients and servers sent, for people and for machines."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from cutlayer.cli.tables import plain_table
from cutlayer.recipes.scale import unscaled
from cutlayer.results.report import Comparison
from cutlayer.studies import traffic

LEAST = 0.005  # GiB; smaller sizes need more than two decimals
CONVENTION = (
    "by the convention of HO-SFL's Table 3: without labels, settings, set-up and what goes between servers; where an "
    "auxiliary model goes down, the client's own is left out"
)


def document(found: Comparison, samples: int | None, *, paper_convention: bool) -> dict[str, Any]:
    """Return the bytes by run and row, with the paper's own numbers where it prints this run."""
    panels = []
    for panel in found.panels:
        columns = [traffic.column(group, samples, paper_convention=paper_convention) for group in panel.groups]
        runs = [{**column.as_dict(), "published": _published(panel.recipe.traffic, column.name)} for column in columns]
        panels.append({"panel": panel.name, "runs": runs})
    return {"samples": samples, "paper_convention": paper_convention, "panels": panels}


def _published(printed: Mapping[str, tuple[str, ...]], name: str) -> dict[str, str]:
    """Return what the paper prints of this run, by row."""
    cells = printed.get(unscaled(name))
    return {} if cells is None else dict(zip(traffic.PAPER_ROWS, cells, strict=True))


def tables(found: Mapping[str, Any]) -> Lines:
    """Return a table for each panel, with a column for each run."""
    several = len(found["panels"]) > 1
    printed = [_table(panel["runs"], panel["panel"] if several else "") for panel in found["panels"]]
    return Lines(*printed, *map(Text, _remarks(found)))


def _table(runs: list[Mapping[str, Any]], title: str) -> Table:
    """Put the paper's column beside ours where there is one; rows of our own that are 0 everywhere are left out."""
    columns: list[tuple[str, Mapping[str, str]]] = []
    for run in runs:
        ours = {row: gib(size) for row, size in run["bytes"].items()}
        total = {"Total": gib(sum(run["bytes"].values())), "samples": f"{run['samples']:,.0f}"}
        columns.append((run["label"], ours | total))
        if run["published"]:
            columns.append(("paper", run["published"]))
    filled = [row for row in runs[0]["bytes"] if row in traffic.PAPER_ROWS or any(r["bytes"][row] for r in runs)]
    heads = [head for head, _ in columns]
    rows = [[row, *(cells.get(row, "") for _, cells in columns)] for row in (*filled, "Total", "samples")]
    return plain_table(["GiB", *heads], rows, left=["GiB"], fold=heads, title=title)


def gib(size: float) -> str:
    """Format bytes as GiB: 1.22, and one digit of less than a hundredth: 0.004, 0.00002."""
    value = size / traffic.GIB
    return f"{Decimal(f'{value:.1g}'):f}" if 0 < value < LEAST else f"{value:.2f}"


def _remarks(found: Mapping[str, Any]) -> list[str]:
    samples = found["samples"]
    if samples is None:
        length = "of whole runs, means over seeds"
    elif found["paper_convention"]:
        length = f"bytes a sample × the samples of a run that ends with the first round beyond {samples:,}"
    else:
        length = f"bytes a sample × {samples:,}"
    return [f"GiB of 2^30 bytes; {length}", *([CONVENTION] if found["paper_convention"] else [])]
