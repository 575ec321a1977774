"""The bytes that clients and servers sent, for people and for machines."""

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from cutlayer.cli.tables import Section, Sheet, plain_table
from cutlayer.recipes.scale import unscaled
from cutlayer.results.report import Comparison
from cutlayer.studies import traffic
from cutlayer.studies.traffic import BEFORE

LEAST = 0.005  # units; smaller sizes need more than two decimals


class SizeUnit(NamedTuple):
    """Bytes as people read them."""

    name: str
    power: int  # of 2


GIB, MIB = SizeUnit("GiB", 30), SizeUnit("MiB", 20)
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


def sections(found: Mapping[str, Any]) -> list[Section]:
    """Return a table for each panel, with a column for each run; the last one has the remarks."""
    several, last, unit = len(found["panels"]) > 1, len(found["panels"]) - 1, _unit(found)
    made = []
    for number, panel in enumerate(found["panels"]):
        name = panel["panel"] if several else ""
        remarks = _remarks(found, unit) if number == last else []
        made.append(Section(name=name, sheet=_table(panel["runs"], name, unit), remarks=remarks))
    return made


def records(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a record for each run and row, in bytes."""
    return [
        {"panel": panel["panel"], "run": run["label"], "samples": run["samples"], "row": row, "bytes": size}
        | ({BEFORE: run[BEFORE][row]} if BEFORE in run else {})
        for panel in found["panels"]
        for run in panel["runs"]
        for row, size in run["bytes"].items()
    ]


def _unit(found: Mapping[str, Any]) -> SizeUnit:
    """Return MiB where all runs are small; papers print GiB."""
    runs = [run for panel in found["panels"] for run in panel["runs"]]
    totals = (sum(sizes.values()) for run in runs for sizes in (run["bytes"], run.get(BEFORE, {})))
    as_paper = found["paper_convention"] or any(run["published"] for run in runs)
    return GIB if as_paper or max(totals, default=0) >= 2**GIB.power else MIB


def _table(runs: list[Mapping[str, Any]], title: str, unit: SizeUnit) -> Sheet:
    """Put beside our column what it was before codecs, and the paper's, where there is one.

    Rows of our own that are 0 everywhere are left out.
    """
    columns: list[tuple[str, Mapping[str, str]]] = []
    for run in runs:
        columns.append((run["label"], _cells(run["bytes"], unit) | {"samples": f"{run['samples']:,.0f}"}))
        if BEFORE in run:
            columns.append((f"{run['label']}\nbefore codecs", _cells(run[BEFORE], unit)))
        if run["published"]:
            columns.append((f"{run['label']}\npaper", run["published"]))
    filled = [row for row in runs[0]["bytes"] if row in traffic.PAPER_ROWS or any(r["bytes"][row] for r in runs)]
    heads = [head for head, _ in columns]
    rows = [[row, *(cells.get(row, "") for _, cells in columns)] for row in (*filled, "Total", "samples")]
    return plain_table([unit.name, *heads], rows, left=[unit.name], title=title)


def _cells(rows: Mapping[str, float], unit: SizeUnit) -> dict[str, str]:
    return {row: in_units(size, unit) for row, size in rows.items()} | {"Total": in_units(sum(rows.values()), unit)}


def in_units(size: float, unit: SizeUnit) -> str:
    """Format bytes: 1.22, and one digit of less than a hundredth: 0.004, 0.00002."""
    value = size / 2**unit.power
    return f"{Decimal(f'{value:.1g}'):f}" if 0 < value < LEAST else f"{value:,.2f}"


def _remarks(found: Mapping[str, Any], unit: SizeUnit) -> list[str]:
    samples = found["samples"]
    if samples is None:
        length = "of whole runs, means over seeds"
    elif found["paper_convention"]:
        length = f"bytes a sample × the samples of a run that ends with the first round beyond {samples:,}"
    else:
        length = f"bytes a sample × {samples:,}"
    return [f"{unit.name} of 2^{unit.power} bytes; {length}", *([CONVENTION] if found["paper_convention"] else [])]
