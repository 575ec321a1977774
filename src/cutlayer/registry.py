"""Names to things: how a configuration finds a model, a method or an optimiser without import paths."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from cutlayer.errors import ConfigError, UnknownNameError

T = TypeVar("T")


def find(what: str, table: Mapping[str, T], name: str, where: str = "") -> T:
    """The entry of this name, or the nearest names."""
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
    where: str = "",
) -> T:
    """Call the entry of this name with the user's options, and with what the program itself gives it."""
    given = given or {}
    entry = find(what, table, name, where)
    known = options_of(entry, given)
    for option in options:
        if option not in known:
            raise UnknownNameError("option", option, known, where or f"{what} {name!r}")
    needed = [k for k, p in known.items() if p.default is p.empty and k not in options]
    if needed:
        raise ConfigError(f"{what} {name!r} needs {needed[0]}; add it{f' in {where}' if where else ''}")
    as_tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}  # TOML has only lists
    return entry(**given, **as_tuples)


def options_of(entry: Callable[..., Any], given: Collection[str] = ()) -> dict[str, inspect.Parameter]:
    """The options that a user may set."""
    return {k: p for k, p in inspect.signature(entry).parameters.items() if k not in given}
