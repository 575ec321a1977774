"""Run the operations of a chain."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from cutlayer.core import calculus, tree
from cutlayer.core.tree import Tree
from cutlayer.engines.graph.compiling import outliving
from cutlayer.engines.graph.forms import follow
from cutlayer.engines.graph.in_place import form_in_place
from cutlayer.engines.graph.queue import Argument, Literal, Operation


class Inputs(NamedTuple):
    """The inputs of a chain."""

    reads: Sequence[Tree]
    externals: Sequence[Tree]
    common: Mapping[int, Tree]


class Ran(NamedTuple):
    """An operation that has run."""

    first: int  # the number of its first result
    operation: Operation
    args: list[Any]
    made: tuple[Any, ...]


def executed(
    chain: Sequence[Operation], inputs: Inputs, lasting: frozenset[int] = frozenset(), homes: Mapping[int, Tree] = {}
) -> list[Any]:
    """Run a chain and return the results of all its operations, in order.

    `lasting` has the numbers of pullbacks that outlive the chain: they get copies of their arguments, which nobody
    overwrites. `homes` has memory, by number, into which results are written in place.
    """
    return [value for ran in running(chain, inputs, lasting, homes) for value in ran.made]


def running(
    chain: Sequence[Operation], inputs: Inputs, lasting: frozenset[int], homes: Mapping[int, Tree]
) -> Iterator[Ran]:
    """Run the operations one after another."""
    made: list[Any] = []
    sources = {**inputs._asdict(), "made": made}

    def value_of(arg: Any) -> Any:
        if isinstance(arg, Argument):
            return follow(sources[arg.source][arg.number], arg.path)
        return arg.value if isinstance(arg, Literal) else tuple(map(value_of, arg.items))

    for operation in chain:
        args, first = [value_of(a) for a in operation.args], len(made)
        lasts = operation.how == "vjp" and first + 1 in lasting
        if lasts:
            args = [tree.owned(a) for a in args]
        write = form_in_place(operation) if first in homes else None
        with outliving() if lasts else nullcontext():
            own = (write(*args, homes[first]),) if write else done(operation, args)
        made += own
        yield Ran(first, operation, args, own)


def done(operation: Operation, args: list[Any]) -> tuple[Any, ...]:
    """Run one operation on these values, and return its results."""
    fn = operation.fn.value
    if operation.how == "call":
        return (fn(*args),)
    if operation.how == "vjp":
        return calculus.vjp(fn, args, operation.cut)
    return (calculus.gradient(fn, args, operation.cut) if operation.how == "grad" else args[0](args[1]),)
