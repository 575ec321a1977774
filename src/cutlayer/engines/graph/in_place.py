"""Optimiser steps on rows, and in-place forms of functions, which write their result into given memory."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from cutlayer.core.state import Grads, Part
from cutlayer.core.tree import Tree
from cutlayer.engines.graph import rows
from cutlayer.engines.graph.compiling import compiled
from cutlayer.engines.graph.queue import Operation
from cutlayer.engines.graph.rows import Rows
from cutlayer.optim.optimiser import Optimiser, stepped

Fn = Callable[..., Tree]
F = TypeVar("F", bound=Fn)
_IN_PLACE: dict[Any, Fn] = {}  # in-place forms, by the method that they stand for


def in_place(method: Fn) -> Callable[[F], F]:
    """Register a function as the in-place form of a method: its last argument is the memory for the result."""

    def declare(form: F) -> F:
        _IN_PLACE[method] = form
        return form

    return declare


def form_in_place(operation: Operation) -> Fn | None:
    """Return the in-place form of an operation's function, if it has one."""
    fn = operation.fn.value
    form = _IN_PLACE.get(fn.__func__) if operation.how == "call" and isinstance(fn, MethodType) else None
    return form and partial(form, fn.__self__)


@stepped.register
def _(params: Rows, opt: Optimiser, part: Part, grads: Grads) -> Part:
    if not _works_on_rows(opt, part, grads):
        return opt.update(part, grads)
    return rows.apart(compiled(opt.update)(*rows.together(part, grads)), part)


@in_place(Optimiser.step)
def step_in_place(opt: Optimiser, part: Part, grads: Grads, home: Part) -> Part:
    """Take a step that writes parameters and moments into those of `home`, which may be the part itself."""
    if not _works_on_rows(opt, part, grads):
        return opt.update(part, grads)
    params, moments = rows.within(home)
    rest = compiled(opt.update_in_place)(*rows.together(part, grads), params, moments)
    return rows.apart(rest._replace(params=params, moments=moments), part)


def _works_on_rows(opt: Optimiser, part: Part, grads: Grads) -> bool:
    return opt.treats_values_alike and rows.fits(part, grads)
