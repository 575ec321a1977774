"""A dry run: what every run checks before its first round, without training and without writing anything."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cutlayer import recipes
from cutlayer.cli.options import Orders
from cutlayer.cli.progress import telling
from cutlayer.core.checks import reason
from cutlayer.errors import CutlayerError, DataError, UsageError
from cutlayer.runs import build
from cutlayer.runs.config import Run

log = logging.getLogger("cutlayer")


def check(runs: Sequence[Run], orders: Orders) -> None:
    """Raise an error that names each run that could not be trained, and why.

    The data of a recipe may be missing here, since it can be read without them; a warning says what was not checked.
    """
    failures: list[str] = []
    missing: dict[str, list[str]] = {}  # the runs without their data, by what the error says
    with telling(Console(stderr=True), orders.quiet):
        for run in runs:
            try:
                if without := _built(run, orders.data):
                    missing.setdefault(without, []).append(run.name)
            except Exception as error:  # it may come from anybody's code
                if len(runs) == 1:
                    raise
                failures.append(f"{run.name}: {told(error)}")
        for why, names in missing.items():
            log.warning("%d of %d runs were only read, not checked: %s", len(names), len(runs), why)
    if failures:
        raise UsageError("\n".join([f"{len(failures)} of {len(runs)} runs cannot be trained:", *failures]))


def told(error: Exception) -> str:
    return str(error) if isinstance(error, CutlayerError) else f"{type(error).__name__}: {reason(error)}"


def _built(run: Run, root: Path | None) -> str:
    """Build the run as for training, on this machine; return why that is impossible if a recipe's data are missing."""
    here = replace(run, engine="loop", device="cpu")  # it is found here, whatever the run will be trained on
    try:
        sets = build.dataset(here, root)
    except DataError as error:
        if recipes.of(run.name) is None:
            raise
        return str(error)
    build.training(here, root, sets)
    return ""
