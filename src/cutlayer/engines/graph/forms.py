"""Forms: what a value looks like without its content, and where it lies in rows of memory."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.transfer import sent
from cutlayer.core.tree import Tree
from cutlayer.engines.graph.rows import Position, Rows, copy_all

NUMBERS: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}  # numbers in a value are tensors in a row
Path = tuple[Any, ...]  # names of fields and places in tuples, from the root of a value
Memory = dict[torch.dtype, Tensor]  # a row for each type


class Form:
    """What a value looks like; two values that look alike have one and the same form."""

    def __init__(self, bare: Tree, forms: "Forms", *, is_pullback: bool = False) -> None:
        self.bare = bare  # tensors without content; numbers are those of the first such value
        self.is_pullback = is_pullback
        self._forms = forms
        self._fields: dict[Any, Form] = {}
        self._stretches: dict[tuple[Form, Path], list[Stretch] | None] = {}

    def field(self, name: Any) -> "Form":
        if name not in self._fields:
            self._fields[name] = self._forms.of(tree.field(self.bare, name))
        return self._fields[name]

    def stretches(self, inner: "Form", path: Path) -> "list[Stretch] | None":
        """Where the field at this path lies in the rows of such a value; see below."""
        if (inner, path) not in self._stretches:
            self._stretches[inner, path] = stretches(self, inner, path)
        return self._stretches[inner, path]

    @cached_property
    def layout(self) -> "Layout":
        return Layout(self.bare)


class Forms:
    """All forms that are known, by what makes them different."""

    def __init__(self) -> None:
        self._known: dict[Any, Form] = {}

    def of(self, value: Tree) -> Form:
        signature = tree.signature(value)
        if signature not in self._known:
            self._known[signature] = Form(tree.shapes(value), self)
        return self._known[signature]

    def pullback(self) -> Form:
        """Of a pullback, which is like no other."""
        return Form(None, self, is_pullback=True)


def follow(value: Tree, path: Path) -> Tree:
    for name in path:
        value = tree.field(value, name)
    return value


class Layout:
    """Positions for all tensors and numbers of a value in rows, one row a type, in the order of the tree."""

    def __init__(self, bare: Tree) -> None:
        self.sizes: dict[torch.dtype, int] = {}
        self.tree = self._placed(bare)  # the value with positions in place of tensors and numbers

    def _placed(self, bare: Tree) -> Tree:
        if isinstance(bare, dict):
            return {k: self._placed(v) for k, v in bare.items()}
        if isinstance(bare, tuple):
            return tree.rebuild(bare, [self._placed(v) for v in bare])
        if isinstance(bare, Tensor):
            return self._next(bare.dtype, tuple(bare.shape))
        return self._next(NUMBERS[type(bare)], ()) if type(bare) in NUMBERS else bare

    def _next(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Position:
        position = Position(dtype, self.sizes.get(dtype, 0), shape, _strides(shape, dtype))
        self.sizes[dtype] = position.end
        return position

    def of(self, memory: Memory) -> Tree:
        """The value whose tensors lie in these rows; its numbers are tensors, too."""
        return _built(self.tree, memory)

    def empty(self, device: torch.device) -> Memory:
        return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}


def _built(placed: Tree, memory: Memory) -> Tree:
    if isinstance(placed, dict):
        is_flat = placed and all(isinstance(v, Position) for v in placed.values())
        return _in_rows(placed, memory) if is_flat else {k: _built(v, memory) for k, v in placed.items()}
    if isinstance(placed, tuple):
        return tree.rebuild(placed, [_built(v, memory) for v in placed])
    return placed.of(memory[placed.dtype]) if isinstance(placed, Position) else placed


def _in_rows(positions: dict[str, Position], memory: Memory) -> Rows:
    """The tensors of a dict with the stretch of each row that holds them."""
    starts: dict[torch.dtype, int] = {}
    ends: dict[torch.dtype, int] = {}
    for position in positions.values():
        starts.setdefault(position.dtype, position.start)
        ends[position.dtype] = position.end
    rows = {dtype: memory[dtype][start : ends[dtype]] for dtype, start in starts.items()}
    return Rows(rows, {name: replace(p, start=p.start - starts[p.dtype]) for name, p in positions.items()})


def _positions(placed: Tree) -> list[Position]:
    return [leaf for leaf in tree.leaves(placed) if isinstance(leaf, Position)]


class Stretch(NamedTuple):
    """Where a part of a value lies in the row of one type."""

    dtype: torch.dtype
    start: int
    size: int


def stretches(form: Form, inner: Form, path: Path) -> list[Stretch] | None:
    """Where the field of a value at this path, which has the inner form, lies in the value's rows.

    None for a field that is made up of others in another order.
    """
    mine = _positions(follow(form.layout.tree, path))
    found: dict[torch.dtype, Stretch] = {}
    for outer, own in zip(mine, _positions(inner.layout.tree), strict=True):
        stretch = Stretch(own.dtype, outer.start - own.start, inner.layout.sizes[own.dtype])
        if found.setdefault(own.dtype, stretch) != stretch:
            return None
    return list(found.values())


def _strides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Channels last for weights and images: the order that convolutions on a GPU are fastest in."""
    empty = torch.empty(shape, device="meta", dtype=dtype)
    last = len(shape) == 4 and dtype.is_floating_point
    return (empty.contiguous(memory_format=torch.channels_last) if last else empty).stride()


def copy_into(target: Tree, source: Tree) -> None:
    """Write a value into rows: numbers as they are, tensors that lie side by side in both as one."""
    into: list[Tensor] = []
    of: list[Tensor] = []
    for there, here in pairs(target, source):
        if not isinstance(here, Tensor):
            there.fill_(here)
        elif here.device != there.device:
            there.copy_(sent(here, there.device))
        elif not is_there(there, here):
            into.append(there)
            of.append(here.detach())
    copy_all(into, of)


def is_there(home: Tensor, value: Tensor) -> bool:
    """Whether a value lies in its home already."""
    return value.data_ptr() == home.data_ptr() and value.stride() == home.stride()


def pairs(target: Tree, source: Tree) -> Iterator[tuple[Tensor, Any]]:
    """Each tensor of the target with what belongs there; where both are rows of one order, the rows themselves."""
    if isinstance(target, Rows) and isinstance(source, Rows) and source.positions == target.positions:
        yield from ((row, source.rows[dtype]) for dtype, row in target.rows.items())
    elif isinstance(target, dict):
        for name, there in target.items():
            yield from pairs(there, source[name])
    elif isinstance(target, tuple):
        for there, here in zip(target, source, strict=True):
            yield from pairs(there, here)
    elif isinstance(target, Tensor):
        yield target, source
