"""Functions that make a method of pieces: they check what every method gets, and the method remembers the call."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

from cutlayer.core.checks import check_optimiser, check_type
from cutlayer.core.method import OPTIMISERS
from cutlayer.split import Split

P = ParamSpec("P")
M = TypeVar("M")


class Call(NamedTuple):
    """The call of a function that made a method: its name and the arguments that were given."""

    name: str
    arguments: Mapping[str, Any]


def factory(make: Callable[P, M]) -> Callable[P, M]:
    """Mark a function with keyword arguments that makes a method."""

    @wraps(make)
    def made(*args: P.args, **arguments: P.kwargs) -> M:
        if "model" in arguments:
            check_type("model", arguments["model"], Split, "such as Split(net, cut=1)")
        for name in OPTIMISERS:
            check_optimiser(name, arguments.get(name))
        method = make(*args, **arguments)
        object.__setattr__(method, "_call", Call(make.__name__, arguments))  # methods are frozen
        return method

    return made


def call_of(method: object) -> Call | None:
    """Return the call that made a method, or None if it was made without such a function."""
    call: Call | None = vars(method).get("_call")
    return call
