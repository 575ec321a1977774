"""Select runs of a recipe by the words of --only."""

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.runs.config import Run

METHOD = -1  # the position of a word that is a method and in no name


def chosen(runs: Sequence[Run], only: Iterable[str], what: str) -> tuple[Run, ...]:
    """Return the runs that these words select.

    Words at the same position of the names are alternatives, words at different positions must all match: of runs such
    as study/cifar10/sfl_v1, the words cifar10, tiny and sfl_v1 select two. A word in no name may be a method.
    """
    wanted: dict[int, set[str]] = {}
    for word in only:
        wanted.setdefault(_place(word, runs, what), set()).add(word)
    found = tuple(run for run in runs if all(_word(run, place) in words for place, words in wanted.items()))
    if not found:
        words = ", ".join(sorted(word for some in wanted.values() for word in some))
        raise ConfigError(f"no run of {what} has all of the words {words} (--only); see --dry-run for the names")
    return found


def _place(word: str, runs: Sequence[Run], what: str) -> int:
    names = [PurePosixPath(run.name).parts for run in runs]
    for place in range(max(map(len, names))):
        if any(_word(run, place) == word for run in runs):
            return place
    if any(run.method.name == word for run in runs):
        return METHOD
    known = {part for parts in names for part in parts[1:] or parts} | {run.method.name for run in runs}
    raise UnknownNameError("run", word, known, f"{what} (--only)")


def _word(run: Run, place: int) -> str:
    parts = PurePosixPath(run.name).parts
    if place == METHOD:
        return run.method.name
    return parts[place] if place < len(parts) else ""
