"""Tables of names: how a configuration finds a method, a model or a data set without import paths.

There is one table for each kind of thing. Each package of cutlayer fills its own table, and plug-in files add to them.
So does every installed package with an entry point in the group `cutlayer.plugins`: the entry point names a module with
the same tables as a plug-in file. It is loaded when somebody asks for an unknown name or for all names.
"""

import inspect
import logging
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, TypeVar

from cutlayer.errors import ConfigError, UnknownNameError

T = TypeVar("T")
Parameters = Mapping[str, inspect.Parameter]
log = logging.getLogger("cutlayer")


class Table(UserDict[str, T]):
    """The entries of one kind, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, str] = {}  # by name: the plug-in that added the entry

    def __missing__(self, name: str) -> T:
        load_installed()
        return self.data[name]

    def __contains__(self, name: object) -> bool:
        if name not in self.data:
            load_installed()
        return name in self.data

    def __iter__(self) -> Iterator[str]:
        load_installed()
        return iter(self.data)


TABLES: dict[str, Table[Any]] = {  # by the name of the table in a plug-in
    **{word: Table() for word in ("METHODS", "MODELS", "DATA", "ENGINES", "PARTITIONS", "OPTIMISERS", "SCHEDULES")},
    **{word: Table() for word in ("DEVICES", "METERS", "CODECS", "SAMPLERS", "LOSSES", "METRICS")},
}
_groups = ["cutlayer.plugins"]  # groups of entry points that are not loaded yet


def table(word: str, entries: Mapping[str, T]) -> Table[T]:
    """Add the package's own entries to a table and return it."""
    TABLES[word].data.update(entries)
    return TABLES[word]


def add(plugin: str, module: Mapping[str, Any]) -> None:
    """Add all entries of a plug-in's module, or none if one of them is invalid."""
    found = {word: module[word] for word, own in TABLES.items() if module.get(word, own) is not own}
    if not found:
        raise ConfigError(f"the plugin {plugin} has none of {', '.join(TABLES)}, so it brings nothing")
    for word, entries in found.items():
        if not isinstance(entries, dict) or not all(isinstance(k, str) and callable(v) for k, v in entries.items()):
            raise ConfigError(f"{word} of the plugin {plugin} must be a dict of names and functions")
        for name, entry in entries.items():
            if TABLES[word].data.get(name, entry) is not entry and TABLES[word].origins.get(name) != plugin:
                raise ConfigError(
                    f"the plugin {plugin} has {name!r} in {word}, which there is already; choose another name"
                )
    for word, entries in found.items():
        TABLES[word].origins.update({name: plugin for name in entries if name not in TABLES[word].data})
        TABLES[word].data.update(entries)


def load_installed() -> None:
    """Load the plug-ins of installed packages, once; warn about one that fails and skip it."""
    while _groups:
        for point in entry_points(group=_groups.pop()):
            plugin = point.name if point.dist is None else f"{point.name} of {point.dist.name}"
            try:
                add(plugin, vars(point.load()))
            except Exception as error:  # a broken package of somebody else must not end a command
                log.warning("the plugin %s is left out: %s: %s", plugin, type(error).__name__, error)


def find(what: str, table: Mapping[str, T], name: str, where: str = "") -> T:
    """Return the entry of this name; an unknown name raises an error that suggests the nearest ones."""
    if name not in table:
        raise UnknownNameError(what, name, table, where)
    return table[name]


def make(
    what: str,
    table: Mapping[str, Callable[..., T]],
    name: str,
    options: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
) -> T:
    """Call the entry of this name with the user's options and with the arguments that the program supplies."""
    given = given or {}
    entry = find(what, table, name)
    check_options(f"{what} {name!r}", options_of(entry, given), options)
    as_tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}  # TOML has only lists
    return entry(**given, **as_tuples)


def check_options(what: str, known: Parameters, options: Mapping[str, Any], where: str = "") -> None:
    """Raise an error for an unknown option, and for a required one that is missing."""
    for option in options:
        if option not in known:
            raise UnknownNameError("key" if where else "option", option, known, where or what)
    for option, parameter in known.items():
        if option not in options and parameter.default is parameter.empty:
            raise ConfigError(f"{what} needs {option}; add it{f' in {where}' if where else ''}")


def options_of(entry: Callable[..., Any], given: Collection[str] = ()) -> dict[str, inspect.Parameter]:
    """Return the options that a user may set in a configuration; fields marked `python_only` are left out."""
    hidden = {f.name for f in fields(entry) if "python_only" in f.metadata} if is_dataclass(entry) else set()
    parameters = inspect.signature(entry).parameters
    return {k: p for k, p in parameters.items() if k not in given and k not in hidden}
