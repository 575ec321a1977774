"""Forms: what a value looks like without its content, and where it lies in rows of memory."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlayer import tree
from cutlayer.rows import ALIGNMENT, Place, Rows
from cutlayer.transfer import sent
from cutlayer.tree import Tree

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
        self._layout: Layout | None = None
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

    @property
    def layout(self) -> "Layout":
        if self._layout is None:
            self._layout = Layout(self.bare)
        return self._layout


class Forms:
    """All forms that are known, by what makes them different."""

    def __init__(self) -> None:
        self._known: dict[Any, Form] = {}

    def of(self, value: Tree) -> Form:
        look = _look(value)
        if look not in self._known:
            self._known[look] = Form(tree.shapes(value), self)
        return self._known[look]

    def pullback(self) -> Form:
        """Of a pullback, which is like no other."""
        return Form(None, self, is_pullback=True)


def follow(value: Tree, path: Path) -> Tree:
    for name in path:
        value = tree.field(value, name)
    return value


def _look(value: Tree) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, dict):
        return "dict", tuple((k, _look(v)) for k, v in value.items())
    if isinstance(value, tuple):
        return type(value), tuple(map(_look, value))
    return type(value) if type(value) in NUMBERS else ("as it is", value)


class Layout:
    """Places for all tensors and numbers of a value in rows, one row a type, in the order of the tree."""

    def __init__(self, bare: Tree) -> None:
        self.bare = bare
        self.sizes: dict[torch.dtype, int] = {}
        self.places = [self._place(leaf) for leaf in _leaves(bare)]

    def _place(self, leaf: Tensor | float) -> Place:
        dtype = leaf.dtype if isinstance(leaf, Tensor) else NUMBERS[type(leaf)]
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
        start = self.sizes.get(dtype, 0)
        place = Place(dtype, start, shape, _strides(shape, dtype))
        step = max(1, ALIGNMENT // dtype.itemsize)
        self.sizes[dtype] = start + -(-place.size // step) * step
        return place

    def of(self, memory: Memory) -> Tree:
        """The value whose tensors lie in these rows; its numbers are tensors, too."""
        places = iter(self.places)

        def build(bare: Tree) -> Tree:
            if isinstance(bare, dict):
                own = {k: build(v) for k, v in bare.items()}
                return self._in_rows(own, memory) if _all_tensors(bare) else own
            if isinstance(bare, tuple):
                return tree.rebuild(bare, [build(v) for v in bare])
            if isinstance(bare, Tensor) or type(bare) in NUMBERS:
                place = next(places)
                return place.of(memory[place.dtype])
            return bare

        return build(self.bare)

    def _in_rows(self, named: dict[str, Tensor], memory: Memory) -> Rows:
        """The tensors of a dict with the stretch of each row that holds them."""
        starts: dict[torch.dtype, int] = {}
        ends: dict[torch.dtype, int] = {}
        for value in named.values():
            base, step = memory[value.dtype].storage_offset(), max(1, ALIGNMENT // value.element_size())
            start = int(value.storage_offset() - base)
            starts.setdefault(value.dtype, start)
            ends[value.dtype] = start + -(-value.numel() // step) * step
        rows = {dtype: memory[dtype][starts[dtype] : ends[dtype]] for dtype in starts}
        places = {
            name: Place(v.dtype, int(v.storage_offset() - rows[v.dtype].storage_offset()), tuple(v.shape), v.stride())
            for name, v in named.items()
        }
        return Rows(rows, places)

    def empty(self, device: torch.device) -> Memory:
        return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in self.sizes.items()}


class Stretch(NamedTuple):
    """Where a part of a value lies in the row of one type."""

    dtype: torch.dtype
    start: int
    size: int


def stretches(form: Form, inner: Form, path: Path) -> list[Stretch] | None:
    """Where the field of a value at this path, which has the inner form, lies in the value's rows.

    None for a field that is made up of others in another order.
    """
    places = iter(form.layout.places)
    mine = [leaf.place for leaf in tree.leaves(follow(_with_places(form.bare, places), path)) if type(leaf) is _At]
    found: dict[torch.dtype, Stretch] = {}
    for outer, own in zip(mine, inner.layout.places, strict=True):
        stretch = Stretch(own.dtype, outer.start - own.start, inner.layout.sizes[own.dtype])
        if found.setdefault(own.dtype, stretch) != stretch:
            return None
    return list(found.values())


class _At:
    """Stands for a tensor or number of a value."""

    def __init__(self, place: Place) -> None:
        self.place = place


def _with_places(bare: Tree, places: Iterator[Place]) -> Tree:
    if isinstance(bare, dict):
        return {k: _with_places(v, places) for k, v in bare.items()}
    if isinstance(bare, tuple):
        return tree.rebuild(bare, [_with_places(v, places) for v in bare])
    return _At(next(places)) if isinstance(bare, Tensor) or type(bare) in NUMBERS else bare


def _leaves(bare: Tree) -> Iterator[Any]:
    return (leaf for leaf in tree.leaves(bare) if isinstance(leaf, Tensor) or type(leaf) in NUMBERS)


def _all_tensors(bare: dict[str, Any]) -> bool:
    return bool(bare) and all(isinstance(v, Tensor) for v in bare.values())


def _strides(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Channels last for weights and images: the order that convolutions on a GPU are fastest in."""
    empty = torch.empty(shape, device="meta", dtype=dtype)
    last = len(shape) == 4 and dtype.is_floating_point
    return (empty.contiguous(memory_format=torch.channels_last) if last else empty).stride()


def copied(target: Tree, source: Tree) -> None:
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
    for dtype in {a.dtype for a in into}:  # all of a type at once
        chosen = [k for k, a in enumerate(into) if a.dtype == dtype]
        torch._foreach_copy_([into[k] for k in chosen], [of[k] for k in chosen])


def is_there(home: Tensor, value: Tensor) -> bool:
    """Whether a value lies in its home already."""
    return value.data_ptr() == home.data_ptr() and value.stride() == home.stride()


def pairs(target: Tree, source: Tree) -> Iterator[tuple[Tensor, Any]]:
    """Each tensor of the target with what belongs there; where both are rows of one order, the rows themselves."""
    if isinstance(target, dict):
        if isinstance(target, Rows) and target and source.keys() == target.keys():
            packed = _as_rows(target, source)
            if packed is not None:
                yield from packed
                return
        for name, there in target.items():
            yield from pairs(there, source[name])
    elif isinstance(target, tuple):
        for there, here in zip(target, source, strict=True):
            yield from pairs(there, here)
    elif isinstance(target, Tensor):
        yield target, source


def _as_rows(target: Rows, source: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
    if not isinstance(source, Rows) or source.places != target.places:
        return None
    return [(row, source.rows[dtype]) for dtype, row in target.rows.items()]
