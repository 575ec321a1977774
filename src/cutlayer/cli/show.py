"""Print what a command has found, for people or for machines."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

LOG_WIDTH = 140  # where there is no terminal to measure


def result(document: Mapping[str, Any], *printed: RenderableType, machine: bool) -> None:
    """Print the JSON document for a machine, the rest for people."""
    if machine:
        typer.echo(json.dumps(document, indent=2))
        return
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else LOG_WIDTH, highlight=False)
    for part in printed:
        console.print(part)


def with_figure(
    document: Mapping[str, Any],
    *printed: RenderableType,
    machine: bool,
    figure: Path | None,
    draw: Callable[[Path], None],
) -> None:
    """Print a result and then draw its figure, so that no numbers are lost if the figure cannot be written."""
    result({**document, "figure": None if figure is None else str(figure)}, *printed, machine=machine)
    if figure is not None:
        draw(figure)
        if not machine:
            typer.echo(f"figure: {figure}")
