"""Names to things: how a configuration finds a model, a method or an optimiser without import paths."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from cutlayer.errors import ConfigError, UnknownNameError

T = TypeVar("T")
Parameters = Mapping[str, inspect.Parameter]


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
) -> T:
    """Call the entry of this name with the user's options, and with what the program itself gives it."""
    given = given or {}
    entry = find(what, table, name)
    check_options(f"{what} {name!r}", options_of(entry, given), options)
    as_tuples = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}  # TOML has only lists
    return entry(**given, **as_tuples)


def check_options(what: str, known: Parameters, options: Mapping[str, Any], where: str = "") -> None:
    """Refuse options that a thing does not know, and miss those that it needs."""
    for option in options:
        if option not in known:
            raise UnknownNameError("key" if where else "option", option, known, where or what)
    for option, parameter in known.items():
        if option not in options and parameter.default is parameter.empty:
            raise ConfigError(f"{what} needs {option}; add it{f' in {where}' if where else ''}")


def options_of(entry: Callable[..., Any], given: Collection[str] = ()) -> dict[str, inspect.Parameter]:
    """The options that a user may set."""
    return {k: p for k, p in inspect.signature(entry).parameters.items() if k not in given}
