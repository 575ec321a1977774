"""What crossed, for people and for machines."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.text import Text

from cutlayer.cli.tables import plain_table
from cutlayer.recipes.scale import unscaled
from cutlayer.results.report import Comparison
from cutlayer.studies import traffic

LEAST = 0.005  # GiB that show with two digits after the point
CONVENTION = (
    "by the convention of HO-SFL's Table 3: without labels, settings, set-up and what goes between servers; where an "
    "auxiliary model goes down, the client's own is left out"
)


def document(found: Comparison, samples: int | None, *, paper_convention: bool) -> dict[str, Any]:
    """Bytes by run and row."""
    panels = []
    for panel in found.panels:
        printed = {} if panel.recipe is None else panel.recipe.traffic
        columns = [traffic.column(group, samples, paper_convention=paper_convention) for group in panel.groups]
        runs = [{**column.as_dict(), "published": _published(printed, column.name)} for column in columns]
        panels.append({"panel": panel.name, "runs": runs})
    return {"samples": samples, "paper_convention": paper_convention, "panels": panels}


def _published(printed: Mapping[str, tuple[str, ...]], name: str) -> dict[str, str]:
    """What the paper prints of this run, by row."""
    cells = printed.get(unscaled(name))
    return {} if cells is None else dict(zip(traffic.PAPER_ROWS, cells, strict=True))


def tables(found: Mapping[str, Any]) -> Lines:
    """A column for each run, a table for each panel; rows of our own that nothing crossed in are left out."""
    printed: list[RenderableType] = []
    for panel in found["panels"]:
        runs = panel["runs"]
        columns = [column for run in runs for column in _columns(run)]
        table = plain_table(panel["panel"] if len(found["panels"]) > 1 else "")
        table.add_column("GiB", no_wrap=True)
        for head, _ in columns:
            table.add_column(head, justify="right", overflow="fold")
        filled = [row for row in runs[0]["bytes"] if row in traffic.PAPER_ROWS or any(r["bytes"][row] for r in runs)]
        for row in (*filled, "Total", "samples"):
            table.add_row(row, *(cells.get(row, "") for _, cells in columns))
        printed.append(table)
    return Lines(*printed, *map(Text, _remarks(found)))


def _columns(run: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """A head and the cells below it by row; the paper's beside ours, where it prints any of this run."""
    ours = {row: gib(size) for row, size in run["bytes"].items()}
    ours |= {"Total": gib(sum(run["bytes"].values())), "samples": f"{run['samples']:,.0f}"}
    return [(run["label"], ours), *([("paper", run["published"])] if run["published"] else [])]


def gib(size: float) -> str:
    """1.22, and one digit of what is less than a hundredth: 0.004, 0.00002."""
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
