"""The runs of a TOML file: one, those of a recipe, those in [[run]] entries, and all combinations of a [grid].

    data = "digits"              # keys of all runs

    [[run]]
    name = "slow"                # the name, below that of the file; by default the entry's method
    optimiser.lr = 0.01

    [[run]]
    method = "smofi"

    [grid]                       # lists: every combination, for every run above
    partition.alpha = [0.1, 1.0]
    seed = [0, 1, 2]

The names are <file>/alpha=0.1/slow, <file>/alpha=0.1/smofi and so on: runs that differ in the last word are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from cutlayer import recipes
from cutlayer.errors import ConfigError
from cutlayer.runs import config
from cutlayer.runs.config import Run, literal

UNNAMED = ("seed",)  # has a folder of its own below the run's name


class Variant(NamedTuple):
    """Changes of a run, and the words that they add to its name."""

    changes: Mapping[str, Any]
    where: str  # in messages
    words: tuple[str, ...] = ()
    method: tuple[str, ...] = ()  # the last word, if the grid has methods


class Axis(NamedTuple):
    """A key of a grid, with its values."""

    path: tuple[str, ...]
    values: Sequence[Any]


def runs_of(content: Mapping[str, Any], stem: str, where: str) -> tuple[Run, ...]:
    """Return the runs of a file; `stem` is their name if it gives none."""
    common = {key: value for key, value in content.items() if key not in ("recipe", "run", "grid")}
    name = common.setdefault("name", stem)
    runs = []
    for base in _bases(content, where):
        first = config.changed(base, common, where)
        rest = base.name.split("/")[1:]
        for entry, point in product(_entries(content, where), _points(content, where)):
            second = config.changed(first, entry.changes, entry.where)
            third = config.changed(second, point.changes, point.where)
            runs.append(replace(third, name="/".join([name, *point.words, *entry.words, *point.method, *rest])))
    _refuse_same_names(runs, where)
    return tuple(runs)


def _bases(content: Mapping[str, Any], where: str) -> Sequence[Run]:
    if "recipe" not in content:
        return (Run(),)
    recipe = content["recipe"]
    if not isinstance(recipe, str):
        raise ConfigError(f'{where}: recipe = {recipe!r} is no name; write for example recipe = "digits"')
    return recipes.recipe(recipe, where).runs


def _entries(content: Mapping[str, Any], where: str) -> list[Variant]:
    """Return the [[run]] entries; without any, the keys of all runs are the only one."""
    if "run" not in content:
        return [Variant({}, where)]
    if not isinstance(content["run"], list) or not all(isinstance(entry, Mapping) for entry in content["run"]):
        raise ConfigError(f"{where}: run must be a list of tables; write [[run]] above each of them")
    return [_entry(entry, f"{where}, [[run]] {number}") for number, entry in enumerate(content["run"], start=1)]


def _entry(entry: Mapping[str, Any], where: str) -> Variant:
    name = entry.get("name", _word(entry["method"]) if "method" in entry else None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where} needs a name; write for example name = "first"')
    return Variant({key: value for key, value in entry.items() if key != "name"}, where, (name,))


def _points(content: Mapping[str, Any], where: str) -> list[Variant]:
    """Return all combinations of the grid; without a grid, one without changes."""
    grid, place = content.get("grid", {}), f"{where}, [grid]"
    if not isinstance(grid, Mapping):
        raise ConfigError(f"{place} must be a table of lists")
    axes = list(_axes(grid, (), place))
    lasts = [axis.path[-1] for axis in axes]
    labels = [axis.path[-1] if lasts.count(axis.path[-1]) == 1 else ".".join(axis.path) for axis in axes]
    points = []
    for values in product(*(axis.values for axis in axes)):
        changes: dict[str, Any] = {}
        for axis, value in zip(axes, values, strict=True):
            _put(changes, axis.path, value)
        words = {label: _word(value) for label, value in zip(labels, values, strict=True) if label not in UNNAMED}
        method = (words.pop("method"),) if "method" in words else ()
        points.append(Variant(changes, place, tuple(f"{label}={word}" for label, word in words.items()), method))
    return points


def _axes(table: Mapping[str, Any], path: tuple[str, ...], where: str) -> Iterable[Axis]:
    for key, value in table.items():
        here = (*path, key)
        if here == ("name",):
            raise ConfigError(f"{where}: the names are made from the values; leave name out")
        if isinstance(value, Mapping):
            yield from _axes(value, here, where)
        elif isinstance(value, list) and value:
            yield Axis(here, value)
        else:
            raise ConfigError(f"{where}: {'.'.join(here)} = {literal(value)} must be a list of values")


def _put(changes: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        changes = changes.setdefault(key, {})
    changes[path[-1]] = value


def _word(value: Any) -> str:
    """Return a value as a word of a name."""
    if isinstance(value, Mapping):
        options = [f"{key}={_word(option)}" for key, option in value.items() if key != "name"]
        return ",".join([*([_word(value["name"])] if "name" in value else []), *options])
    if isinstance(value, list):
        joint = "+" if any(isinstance(each, Mapping) for each in value) else "x"  # a chain of codecs, or a shape
        return joint.join(_word(each) for each in value)
    text = value if isinstance(value, str) else literal(value)
    return text.replace("/", "_").replace("\\", "_")


def _refuse_same_names(runs: Sequence[Run], where: str) -> None:
    seen = set()
    for run in runs:
        if (run.name, run.seed) in seen:
            raise ConfigError(f"{where} has two runs named {run.name} with seed {run.seed}; give each its own name")
        seen.add((run.name, run.seed))
