"""What a chain computes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from cutlayer import calculus, tree
from cutlayer.engines.graph.forms import follow
from cutlayer.engines.graph.queue import Command, Common, Literal, Made, Put, Read
from cutlayer.fusing import outliving
from cutlayer.tree import Tree


class Given(NamedTuple):
    """What a chain computes with."""

    reads: Sequence[Tree]
    puts: Sequence[Tree]
    common: Mapping[int, Tree]


class Step(NamedTuple):
    """One command as it ran."""

    first: int  # the number of the first value that it made
    command: Command
    args: list[Any]
    made: tuple[Any, ...]


def executed(
    commands: Sequence[Command], given: Given, lasting: frozenset[int] = frozenset(), landing: Mapping[int, Tree] = {}
) -> list[Any]:
    """All values that the commands make, in their order.

    A pullback that lasts beyond the chain, by its number, has arguments that nobody overwrites. A value that lands, by
    its number, is written into the memory that is given for it.
    """
    return [value for step in steps(commands, given, lasting, landing) for value in step.made]


def steps(
    commands: Sequence[Command], given: Given, lasting: frozenset[int], landing: Mapping[int, Tree]
) -> Iterator[Step]:
    """The commands, run one after another."""
    made: list[Any] = []

    def value_of(arg: Any) -> Any:
        match arg:
            case Made(number, path):
                return follow(made[number], path)
            case Read(number, path):
                return follow(given.reads[number], path)
            case Put(number):
                return given.puts[number]
            case Common(number, path):
                return follow(given.common[number], path)
            case Literal(_, value):
                return value
        return tuple(map(value_of, arg.items))

    for command in commands:
        args, first = [value_of(a) for a in command.args], len(made)
        lasts = command.how == "vjp" and first + 1 in lasting
        if lasts:
            args = [tree.owned(a) for a in args]
        land = into(command) if first in landing else None
        with outliving() if lasts else nullcontext():
            own = (land(*args, landing[first]),) if land else _done(command, args)
        made += own
        yield Step(first, command, args, own)


def _done(command: Command, args: list[Any]) -> tuple[Any, ...]:
    return done(command.how, command.fn and command.fn.fn, args, command.cut)


def done(how: str, fn: Any, args: list[Any], cut: int | None) -> tuple[Any, ...]:
    """What one operation makes."""
    if how == "call":
        return (fn(*args),)
    if how == "vjp":
        return calculus.vjp(fn, args, cut)
    return (calculus.gradient(fn, args, cut) if how == "grad" else args[0](args[1]),)


def into(command: Command) -> Callable[..., Tree] | None:
    """A method that has one beside it of the same name with `_into`: that one takes memory for its result as well."""
    fn = command.fn and command.fn.fn
    owner, name = getattr(fn, "__self__", None), getattr(fn, "__name__", "")
    return getattr(owner, f"{name}_into", None) if command.how == "call" else None
