"""The runs that a figure shows, written among the keywords of its file, so that it is not lost to a figure of fewer."""

import re
from pathlib import Path
from urllib.parse import quote, unquote

from cutlayer.errors import ConfigError
from cutlayer.results.report import Comparison

MARK = "cutlayer runs: "
WORDS = re.compile(rf"{MARK}([\w%./~ -]+);".encode())  # signs that PNG, PDF and SVG write as they are
NAMED = 2  # in an error


def runs_of(comparison: Comparison) -> frozenset[str]:
    """Return the runs of a comparison by name and seed, including seeds that are not compared."""
    trials = [t for panel in comparison.panels for group in panel.whole for t in group.trials]
    return frozenset(f"{t.run.name}/seed-{t.run.seed}" for t in trials)


def keywords(comparison: Comparison) -> str:
    """Return the runs of a comparison as keywords of a file."""
    return f"{MARK}{' '.join(map(quote, sorted(runs_of(comparison))))};"


def refuse_to_lose(path: Path, comparison: Comparison) -> None:
    """Refuse to replace a file that shows runs which are not compared, or anything else."""
    if not path.is_file():
        return
    found = WORDS.search(path.read_bytes())
    remedy = "choose another --figure, or delete that file first"
    if found is None:
        raise ConfigError(f"{path} is there, and does not say which runs it shows; {remedy}")
    lost = sorted(set(map(unquote, found[1].decode().split())) - runs_of(comparison))
    if lost:
        more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
        raise ConfigError(
            f"{path} shows runs that are not compared here: {', '.join(lost[:NAMED])}{more}; add them, {remedy}"
        )
