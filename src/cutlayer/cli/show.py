"""Print what a command has found, for people, for machines, or as text that other programs read."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

LOG_WIDTH = 80  # where there is no terminal to measure


def result(document: Mapping[str, Any], *printed: RenderableType, machine: bool) -> None:
    """Print the JSON document for a machine, the rest for people."""
    if machine:
        typer.echo(json.dumps(document, indent=2))
        return
    people(*printed)


def people(*printed: RenderableType) -> None:
    """Print for people, as wide as their terminal is."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if known else LOG_WIDTH, highlight=False)
    for part in printed:
        console.print(part)


def prose(*lines: str) -> None:
    """Print lines of text for people; those of a table in Markdown are not broken."""
    people(*(Text(line, no_wrap=line.startswith("|"), overflow="ignore") for line in lines))


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr, where they disturb no table that is written to a file."""
    console = Console(stderr=True)
    for line in lines:
        message(console, f"warning: {line}")


def message(console: Console, text: str) -> None:
    """Print a message, wrapped at the width of the terminal; in a pipe it stays one line."""
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=not wraps(console))


def wraps(console: Console) -> bool:
    """Return whether messages are wrapped: at the width of a terminal, or the one that somebody asks for."""
    return console.file.isatty() or "COLUMNS" in os.environ


def with_figure(
    document: Mapping[str, Any],
    *printed: RenderableType,
    machine: bool,
    figure: Path | None,
    draw: Callable[[Path], None],
) -> None:
    """Print a result and then draw its figure, so that no numbers are lost if the figure cannot be written."""
    result({**document, "figure": None if figure is None else str(figure)}, *printed, machine=machine)
    drawn(figure, draw, quiet=machine)


def drawn(figure: Path | None, draw: Callable[[Path], None], *, quiet: bool) -> None:
    """Draw a figure if there is to be one, and say where it is unless only the result may be on stdout."""
    if figure is not None:
        draw(figure)
        if not quiet:
            typer.echo(f"figure: {figure}")
