"""What a command has found, for people or for machines."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from cutlayer import recipes
from cutlayer.cli import papers, plan_table, tables, traffic_table
from cutlayer.cli import plan as planning
from cutlayer.cli.cut_table import cut_table
from cutlayer.results import figures
from cutlayer.results.report import Comparison
from cutlayer.runs import config
from cutlayer.runs.config import Run
from cutlayer.studies.cuts import CutStudy
from cutlayer.studies.cuts_figure import draw_cuts

LOG_WIDTH = 140  # where there is no terminal to measure


def console() -> Console:
    """Where tables go."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else LOG_WIDTH, highlight=False)


def comparison(found: Comparison, figure: Path | None, machine: bool) -> None:
    """The numbers first: they must not be lost if the figure cannot be written."""
    if machine:
        as_json({**found.as_dict(), "figure": None if figure is None else str(figure)})
    else:
        console().print(papers.comparison(found))
    _curves(found, figure, machine)


def traffic(found: Comparison, samples: int | None, paper_convention: bool, figure: Path | None, machine: bool) -> None:
    """What crossed in each run, by row of the table."""
    document = traffic_table.document(found, samples, paper_convention=paper_convention)
    if machine:
        as_json({**document, "figure": None if figure is None else str(figure)})
    else:
        console().print(traffic_table.tables(document))
    _curves(found, figure, machine)


def cuts(found: CutStudy, figure: Path, machine: bool) -> None:
    """A study of the cut, numbers first."""
    if machine:
        as_json({**found.as_dict(), "figure": str(figure)})
    else:
        console().print(cut_table(found), *found.conclusions(), sep="\n")
    draw_cuts(found, figure)
    if not machine:
        typer.echo(f"figure: {figure}")


def plan(found: planning.PlanAnswer, out: Path | None, figure: Path | None, machine: bool) -> None:
    """A plan, numbers first; then the files that were asked for."""
    document = plan_table.document(found)
    if machine:
        files = {"out": out, "figure": figure}
        as_json({**document, **{name: None if path is None else str(path) for name, path in files.items()}})
    else:
        console().print(plan_table.tables(document))
    if figure is not None:
        figures.draw_plan(found.planned, figure, found.names)
        if not machine:
            typer.echo(f"figure: {figure}")
    if out is not None:
        planning.write(found, out)
        if not machine:
            run, interval = found.run, found.planned.problem.interval
            typer.echo(
                f"plan: {out}, for {run.data}: {run.rounds} rounds of {interval} mini-batches with lr "
                f"{found.planned.problem.bound.lr:g}; train it with: cutlayer run {out}"
            )


def _curves(found: Comparison, figure: Path | None, machine: bool) -> None:
    if figure is not None:
        figures.draw(found, figure)
        if not machine:
            typer.echo(f"figure: {figure}")


def runs(found: Sequence[Run], machine: bool) -> None:
    """Runs that have not been trained."""
    recipe = recipes.of(found[0].name)
    source = "" if recipe is None else recipe.source
    if machine:
        as_json({"source": source or None, "runs": [config.as_dict(run) for run in found]})
    else:
        console().print(tables.run_tables(found), *([f"source: {source}"] if source else []), sep="")


def as_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=2))
