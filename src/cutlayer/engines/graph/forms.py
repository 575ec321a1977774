"""Forms: the structure, types and shapes of a value, and where its tensors lie in rows of memory."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.transfer import sent
from cutlayer.core.tree import Tree
from cutlayer.engines.graph.rows import Position, Rows, copy_all

NUMBERS: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64}  # the dtypes of plain numbers in rows
Path = tuple[Any, ...]  # names of fields and indices of tuples, from the root of a value
Memory = dict[torch.dtype, Tensor]  # a row for each dtype


class Form:
    """What a value looks like. Values that look alike share one form object."""

    def __init__(self, bare: Tree, forms: "Forms", *, is_pullback: bool = False) -> None:
        self.bare = bare  # the value with meta tensors, and with the numbers of the first such value
        self.is_pullback = is_pullback
        self._forms = forms
        self._fields: dict[Any, Form] = {}
        self._stretches: dict[tuple[Form, Path], list[Stretch] | None] = {}

    def field(self, name: Any) -> "Form":
        if name not in self._fields:
            self._fields[name] = self._forms.of(tree.field(self.bare, name))
        return self._fields[name]

    def stretches(self, inner: "Form", path: Path) -> "list[Stretch] | None":
        """Return where the field at this path, which has the inner form, lies in the rows of such a value.

        Return None if the field's tensors do not lie there in its own order.
        """
        if (inner, path) not in self._stretches:
            both = zip(_positions(follow(self.layout.tree, path)), _positions(inner.layout.tree), strict=True)
            sizes = inner.layout.sizes
            found = dict.fromkeys(Stretch(own.dtype, mine.start - own.start, sizes[own.dtype]) for mine, own in both)
            self._stretches[inner, path] = list(found) if len(found) == len(sizes) else None
        return self._stretches[inner, path]

    @cached_property
    def layout(self) -> "Layout":
        return Layout(self.bare)


class Forms:
    """All known forms, by signature."""

    def __init__(self) -> None:
        self._known: dict[Any, Form] = {}

    def of(self, value: Tree) -> Form:
        signature = tree.signature(value)
        if signature not in self._known:
            self._known[signature] = Form(tree.shapes(value), self)
        return self._known[signature]

    def pullback(self) -> Form:
        """Return a new form: no two pullbacks are alike."""
        return Form(None, self, is_pullback=True)


def follow(value: Tree, path: Path) -> Tree:
    for name in path:
        value = tree.field(value, name)
    return value


class Layout:
    """Assigns positions in rows, one row for each dtype, to the tensors and numbers of a value, in order."""

    def __init__(self, bare: Tree) -> None:
        self.sizes: dict[torch.dtype, int] = {}
        # The value with positions in place of tensors and numbers.
        self.tree = tree.replace((Tensor, *NUMBERS), self._next, bare)

    def _next(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) and type(leaf) not in NUMBERS:  # a bool, although it is an int
            return leaf
        dtype, shape = (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, Tensor) else (NUMBERS[type(leaf)], ())
        position = Position(dtype, self.sizes.get(dtype, 0), shape, _strides(shape, dtype))
        self.sizes[dtype] = position.end
        return position

    def of(self, memory: Memory) -> Tree:
        """Return the value whose tensors lie in these rows; its numbers are tensors, too."""
        return _built(self.tree, memory)

    def empty(self, device: torch.device, *lanes: int) -> Memory:
        """Return rows for one value, or a matrix with a row for each of so many lanes."""
        return {dtype: torch.zeros(*lanes, size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}


def _built(placed: Tree, memory: Memory) -> Tree:
    if isinstance(placed, dict):
        is_flat = placed and all(isinstance(v, Position) for v in placed.values())
        return _in_rows(placed, memory) if is_flat else {k: _built(v, memory) for k, v in placed.items()}
    if isinstance(placed, tree.NESTED):
        return tree.rebuild(placed, [_built(v, memory) for v in placed])
    return placed.of(memory[placed.dtype]) if isinstance(placed, Position) else placed


def _in_rows(positions: dict[str, Position], memory: Memory) -> Rows:
    """Return the tensors of a dict, with the stretch of each row that they fill."""
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
    """Where a part of a value lies in the row of one dtype."""

    dtype: torch.dtype
    start: int
    size: int


def _strides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return contiguous strides; channels last for weights and images, as GPU convolutions are fastest on these."""
    empty = torch.empty(shape, device="meta", dtype=dtype)
    last = len(shape) == 4 and dtype.is_floating_point
    return (empty.contiguous(memory_format=torch.channels_last) if last else empty).stride()


def copy_into(target: Tree, source: Tree) -> None:
    """Copy a value into rows."""
    copy_pairs(pairs(target, source))


def copy_pairs(both: Iterable[tuple[Tensor, Any]]) -> None:
    """Copy into each tensor the number or tensor beside it; tensors of equal types in one operation."""
    into: list[Tensor] = []
    of: list[Tensor] = []
    for there, here in both:
        if not isinstance(here, Tensor):
            there.fill_(here)
        elif here.device != there.device:
            there.copy_(sent(here, there.device))
        elif not is_there(there, here):
            into.append(there)
            of.append(here.detach())
    copy_all(into, of)


def is_there(home: Tensor, value: Tensor) -> bool:
    """Whether a tensor lies at this place already."""
    return value.data_ptr() == home.data_ptr() and value.stride() == home.stride()


def pairs(target: Tree, source: Tree) -> Iterator[tuple[Tensor, Any]]:
    """Yield each tensor of the target with its source; if both are rows with the same positions, whole rows."""
    if isinstance(target, Rows) and isinstance(source, Rows) and source.positions == target.positions:
        yield from ((row, source.rows[dtype]) for dtype, row in target.rows.items())
    elif isinstance(target, dict):
        for name, there in target.items():
            yield from pairs(there, source[name])
    elif isinstance(target, tree.NESTED):
        for there, here in zip(target, source, strict=True):
            yield from pairs(there, here)
    elif isinstance(target, Tensor):
        yield target, source
