"""What a chain computes."""

from collections.abc import Mapping, Sequence
from typing import Any

from cutlayer import calculus, tree
from cutlayer.engines.graph.forms import follow
from cutlayer.engines.graph.queue import Command, Common, Literal, Made, Put, Read
from cutlayer.tree import Tree


def executed(
    commands: Sequence[Command],
    reads: Sequence[Tree],
    puts: Sequence[Tree],
    common: Mapping[int, Tree],
    lasting: frozenset[int],
) -> list[Any]:
    """All values that the commands make, in their order.

    A pullback that lasts beyond the chain, by its number, has arguments that nobody overwrites.
    """
    made: list[Any] = []

    def given(arg: Any) -> Any:
        match arg:
            case Made(number, path):
                return follow(made[number], path)
            case Read(number, path):
                return follow(reads[number], path)
            case Put(number):
                return puts[number]
            case Common(number, path):
                return follow(common[number], path)
            case Literal(_, value):
                return value
        return tuple(map(given, arg.items))

    for command in commands:
        args = [given(a) for a in command.args]
        if command.how == "vjp" and len(made) + 1 in lasting:
            args = [tree.owned(a) for a in args]
        made += done(command.how, command.fn and command.fn.fn, args, command.cut)
    return made


def done(how: str, fn: Any, args: list[Any], cut: int | None) -> tuple[Any, ...]:
    """What one operation makes."""
    if how == "call":
        return (fn(*args),)
    if how == "vjp":
        return calculus.vjp(fn, args, cut)
    return (calculus.gradient(fn, args, cut) if how == "grad" else args[0](args[1]),)
