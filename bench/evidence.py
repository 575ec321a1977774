"""Which runs the papers' tables need, in order of worth, and which of them are done.

evidence.toml lists them. A run is recognised by its content, whatever it is called: tables and figures of one paper
share many runs, and each is trained once.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from cutlayer import recipes
from cutlayer.errors import ConfigError, UnknownNameError
from cutlayer.runs import build, config
from cutlayer.runs.config import Run
from cutlayer.runs.folder import Folder
from cutlayer.runs.run import MAY_CHANGE, with_engines_of
from cutlayer.runs.stopping import Record, ended_early

QUEUE = Path(__file__).with_name("evidence.toml")
RESULTS = Path(__file__).parent / "results" / "headline"
ENDS = ("until_samples", "until_converged", "until_accuracy")
NO_CONTENT = ("name", "seed", *MAY_CHANGE)  # what leaves each round as it is
OWN_KEYS = ("rounds", "seed")  # that an entry has beside its `set`
PARTIAL = ".partial"  # what ends the name of a folder that is still being written


T = TypeVar("T")
Some = Annotated[tuple[T, ...], msgspec.Meta(min_length=1)]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some runs of one worth: all of them with the first seed, then with the next."""

    names: Some[str]  # of runs, panels or recipes
    seeds: Some[int]
    rounds: int | None = None  # the recipe's by default
    set: dict[str, Any] = {}  # keys of the runs that are changed


class Queue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list, and what all of its runs have in common."""

    set: dict[str, Any]
    run: tuple[Entry, ...]


def read(path: Path = QUEUE) -> Queue:
    """The list in a file."""
    try:
        return msgspec.convert(config.read(path), Queue)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {str(error).replace('`', '')}") from None


def wanted(queue: Queue, changes: Mapping[str, Any], where: str) -> list[Run]:
    """The runs of the list, most valuable first, with the changes of a command line."""
    for given in (queue.set, *(entry.set for entry in queue.run)):
        for key in OWN_KEYS:
            if key in given:
                raise ConfigError(f"{where}: set cannot change {key}; give it beside the names of an entry")
    return [
        config.changed(_changed(run, (queue.set, entry.set, _own(entry, seed)), where), changes, "the command line")
        for entry in queue.run
        for seed in entry.seeds
        for name in entry.names
        for run in named(name, where)
    ]


def _own(entry: Entry, seed: int) -> dict[str, int]:
    return {"seed": seed} | ({} if entry.rounds is None else {"rounds": entry.rounds})


def _changed(run: Run, changes: Iterable[Mapping[str, Any]], where: str) -> Run:
    for some in changes:
        run = config.changed(run, some, where)
    return run


def named(name: str, where: str = "") -> tuple[Run, ...]:
    """The run of this name, or the runs of the panel or recipe; `where` tells a user which file the name is in."""
    known = recipes.recipe(name.partition("/")[0], where).runs
    found = tuple(run for run in known if f"{run.name}/".startswith(f"{name}/"))
    if not found:
        raise UnknownNameError("run", name, [run.name for run in known], where)
    return found


def content(run: Run) -> str:
    """What a run trains, apart from its seed and its length."""
    plain = {key: value for key, value in config.as_dict(run).items() if key not in NO_CONTENT}
    if not build.reads_devices(run):
        plain.pop("devices", None)
    return json.dumps(plain, sort_keys=True)


def serves(trained: Run, asked: Run) -> bool:
    """Whether the rounds of one run are those of another; a clock that is asked for must be the same one."""
    timed = asked.devices is None or trained.devices == asked.devices
    alike = (trained.seed, trained.method) == (asked.seed, asked.method)  # most differ here already
    return timed and alike and content(trained) == content(asked)


def distinct(runs: Iterable[Run]) -> list[Run]:
    """The runs without those that others serve: of equal ones the longest, and one with a clock if any has it."""
    found: list[Run] = []
    for run in runs:
        place = next((i for i, other in enumerate(found) if _twins(run, other)), len(found))
        twin = found[place] if place < len(found) else run
        timed = run if twin.devices is None else twin
        found[place : place + 1] = [replace(timed, rounds=max(run.rounds, twin.rounds))]
    return found


def _twins(one: Run, other: Run) -> bool:
    same_end = all(getattr(one, key) == getattr(other, key) for key in ENDS)
    return same_end and (serves(one, other) or serves(other, one))


def done(folder: Folder) -> list[Record]:
    """The rounds that a folder holds: up to the newest checkpoint, or all where only results are kept."""
    newest = max(folder.store.rounds(), default=None)
    return [record for record in folder.history() if newest is None or record["round"] <= newest]


def finished(folder: Folder, run: Run) -> bool:
    """Whether a folder holds the run to its end."""
    history = done(folder)
    return len(history) >= run.rounds or ended_early(run, history)


def begun(*roots: Path) -> list[tuple[Folder, Run]]:
    """The folders below these of runs that have begun, and their runs."""
    found = (Folder(path.parent) for root in roots for path in sorted(root.rglob("config.toml")))
    return [(folder, folder.run()) for folder in found if folder.metrics.exists() and not _partial(folder)]


def _partial(folder: Folder) -> bool:
    return any(part.endswith(PARTIAL) for part in folder.path.parts)


def holding(run: Run, known: Sequence[tuple[Folder, Run]]) -> list[Folder]:
    """The folders whose run serves this one; an engine that is asked for as `auto` is the one chosen there."""
    return [f for f, trained in known if serves(trained, with_engines_of(config.as_dict(trained), run))]


def furthest(folders: Iterable[Folder]) -> Folder | None:
    return max(folders, key=lambda folder: len(done(folder)), default=None)
