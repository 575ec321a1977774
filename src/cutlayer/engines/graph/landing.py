"""Which results of a chain can be written straight to where they go, without a copy of what lay there."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cutlayer import tree
from cutlayer.engines.graph.execute import Given, Step, into, steps
from cutlayer.engines.graph.forms import is_there, pairs
from cutlayer.engines.graph.queue import Command
from cutlayer.tree import Tree


def landable(commands: Sequence[Command], given: Given, homes: Mapping[int, Tree]) -> dict[int, Tree]:
    """Of the values that go home, by their numbers, those that their commands can write there themselves.

    That needs a function that can, and that nothing looks at what lay there once the command is done. The chain runs
    once to see who looks where.
    """
    ran = list(steps(commands, given, frozenset(), {}))
    looks = _looks(ran)
    made = {step.first + k: value for step in ran for k, value in enumerate(step.made)}
    found = {}
    for place, step in enumerate(ran):
        if step.first in homes and into(step.command) is not None:
            home = homes[step.first]
            leaving = [a for number in homes if number != step.first for a in tree.tensors(made[number])]
            passed_on = [
                a for there, a in pairs(home, made[step.first]) if isinstance(a, Tensor) and not is_there(there, a)
            ]
            later = [a for look in looks[place + 1 :] for a in look]
            spans = _spans(home)
            if not any(_is_within(a, spans) for a in (*leaving, *passed_on, *later)):
                found[step.first] = home
    return found


def _looks(ran: Sequence[Step]) -> list[list[Tensor]]:
    """The tensors that each step looks at; a pullback still looks at what its forward pass was given."""
    looks: list[list[Tensor]] = []
    saved: dict[int, list[Tensor]] = {}
    for step in ran:
        look = [a for arg in step.args for a in (saved.get(id(arg), []) if callable(arg) else tree.tensors(arg))]
        saved |= {id(made): look for made in step.made if callable(made)}
        looks.append(look)
    return looks


def _spans(home: Tree) -> list[tuple[int, int]]:
    """From where to where in memory a value lies, for each row that it lies in."""
    spans: dict[int, tuple[int, int]] = {}
    for a in tree.tensors(home):
        start, end = _span(a)
        row = a.untyped_storage().data_ptr()
        low, high = spans.get(row, (start, end))
        spans[row] = min(low, start), max(high, end)
    return list(spans.values())


def _span(a: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(a.shape, a.stride(), strict=True)) if a.numel() else -1
    return a.data_ptr(), a.data_ptr() + (last + 1) * a.element_size()


def _is_within(a: Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    start, end = _span(a)
    return any(start < high and low < end for low, high in spans)
