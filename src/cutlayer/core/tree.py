"""Trees: nested dicts, lists, tuples and named tuples whose leaves are tensors, plain scalars or None.

Plain scalars and None stay as they are under `map`, so a learning rate or a step count is an ordinary Python number on
every engine.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from cutlayer.errors import CheckpointError

Tree = Any
# None for None, a leaf's type (Tensor for every tensor), or (class, keys of a dict or names of fields, structures).
Structure = Any
NUMBERS = (int, float)
PLAIN = (tuple, list)
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    T = WithDefault("T", default=Any)  # of a value; where a class is named without it, it may be any
else:
    T = TypeVar("T")
AnyClass = TypeVar("AnyClass", bound=type)
STORABLE: dict[str, Any] = {}  # by name: the named tuples that checkpoints and messages may hold


def storable(cls: AnyClass) -> AnyClass:
    """Let checkpoints and messages hold values of this class, which has `_fields` and `_make` as a NamedTuple has."""
    if STORABLE.setdefault(cls.__name__, cls) is not cls:
        raise CheckpointError(f"two classes named {cls.__name__!r} cannot both be stored; rename one of them.")
    return cls


class Node:
    """A class of its own that trees go through as through a named tuple."""

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]]

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in self._fields)

    @classmethod
    def _make(cls, items: Iterable[Any]) -> Self:
        return cls(*items)


NESTED = (tuple, list, Node)


class Handle:
    """Stands for a value that is not at hand."""

    __slots__ = ()

    def item(self, name: Any) -> "Handle":
        """Stands for the field of this name; where plain tuples have handles, also for the item of this number."""
        raise NotImplementedError


class Pending(Handle):
    """A value that an engine has not computed yet: all that is known of it is what it looks like."""

    __slots__ = ()

    @property
    def bare(self) -> Tree:
        """The value with tensors that have no content."""
        raise NotImplementedError

    @property
    def signature(self) -> Hashable:
        """What all values of the same shapes have in common, without looking through the value."""
        raise NotImplementedError


def flatten(tree: Tree) -> tuple[Structure, list[Any]]:
    """The structure of a tree, which can be hashed, and its leaves, tensors and scalars alike, in a fixed order."""
    leaves: list[Any] = []
    return _structure(tree, leaves), leaves


def _structure(value: Tree, leaves: list[Any]) -> Structure:
    if isinstance(value, Tensor):
        leaves.append(value)
        return Tensor
    if isinstance(value, dict):
        return dict, tuple(value), tuple([_structure(v, leaves) for v in value.values()])
    if isinstance(value, NESTED):
        cls = _class(value)
        return cls, None if cls in PLAIN else cls._fields, tuple([_structure(v, leaves) for v in value])
    if value is None:
        return None
    if isinstance(value, Pending):
        return _structure(value.bare, leaves)
    leaves.append(value)
    return type(value)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """The tree of this structure with these leaves."""
    supply = iter(leaves)
    return fill(structure, lambda _: next(supply))


def fill(structure: Structure, leaf: Callable[[type], Any]) -> Tree:
    """The tree of this structure; each leaf, in order, is asked for by its type."""
    if structure is None:
        return None
    if isinstance(structure, type):
        return leaf(structure)
    cls, names, items = structure
    values = [fill(item, leaf) for item in items]
    return dict(zip(names, values, strict=True)) if cls is dict else _made(cls, values)


def _class(value: Any) -> Any:
    cls = type(value)
    return cls if cls is list or hasattr(cls, "_make") else tuple  # torch has tuples of its own that cannot be made


def _made(cls: Any, items: list[Any]) -> Any:
    return cls(items) if cls in PLAIN else cls._make(items)


def signature(tree: Tree, *, stacked: bool = False) -> Hashable:
    """The same for trees of the same structure, types and shapes, of each row in a stack; numbers may be any."""
    if isinstance(tree, Pending):
        return tree.signature
    if type(tree) is tuple:  # some of them may be pending
        return tuple([signature(item, stacked=stacked) for item in tree])
    structure, own = flatten(tree)
    return structure, tuple([_form(leaf, stacked) for leaf in own])


def _form(leaf: Any, stacked: bool) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.shape[1:] if stacked else leaf.shape
    return None if type(leaf) in NUMBERS else leaf


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply fn to the tensors of a tree, beside the same places of the other trees."""
    if isinstance(tree, Tensor):
        return fn(tree, *rest)
    if isinstance(tree, dict):
        return {k: map(fn, v, *[r[k] for r in rest]) for k, v in tree.items()}
    if isinstance(tree, NESTED):
        return _made(_class(tree), [map(fn, *items) for items in zip(tree, *rest, strict=True)])
    if isinstance(tree, Pending):
        return map(fn, tree.bare, *rest)
    return tree


def replace(cls: type | tuple[type, ...], fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with fn(value) in place of every value of this class."""
    if isinstance(tree, cls):
        return fn(tree)
    if isinstance(tree, dict):
        return {k: replace(cls, fn, v) for k, v in tree.items()}
    return rebuild(tree, [replace(cls, fn, v) for v in tree]) if isinstance(tree, NESTED) else tree


def rebuild(like: Any, items: list[Any]) -> Any:
    """A list or tuple of the same kind, named or not."""
    return _made(_class(like), items)


def leaves(tree: Tree) -> list[Any]:
    """Every leaf, tensors and scalars alike, in a fixed order."""
    return flatten(tree)[1]


def tensors(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in a fixed order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def num_bytes(tree: Tree) -> int:
    """Bytes on a wire: tensors as they are, plain numbers as 8."""
    return sum(a.numel() * a.element_size() if isinstance(a, Tensor) else 8 for a in leaves(tree))


def where(ok: Tensor, new: Tree, old: Tree) -> Tree:
    """`new` where ok holds, else `old`; no host synchronisation."""
    return map(lambda a, b: torch.where(ok, a, b), new, old)


def owned(tree: Tree) -> Tree:
    """The same values in memory of their own: the strides of a view may change later roundings."""
    return map(lambda a: a.detach().clone(memory_format=torch.contiguous_format), tree)


def field(tree: Tree, name: Any) -> Tree:
    """The field of this name, or the item of this number in a plain tuple."""
    if isinstance(tree, Handle):
        return tree.item(name)
    return tree[name] if isinstance(name, int) else getattr(tree, name)


def bare(tree: Tree) -> Tree:
    """What a value looks like, where it is not computed yet; else the value."""
    return tree.bare if isinstance(tree, Pending) else tree


def detach(tree: Tree) -> Tree:
    """The same values without a graph behind them."""
    return map(lambda a: a.detach(), tree)


def shapes(tree: Tree) -> Tree:
    """The same without content."""
    return map(lambda a: torch.empty(a.shape, dtype=a.dtype, device="meta"), tree)


def zeros(tree: Tree) -> Tree:
    """The same with zeros."""
    return map(lambda a: torch.zeros(a.shape, dtype=a.dtype), tree)


def equal(a: Tree, b: Tree) -> bool:
    """Whether both are the same to the last bit, on the same device."""
    if a is b:
        return True
    (structure, ours), (other, theirs) = flatten(a), flatten(b)
    return structure == other and all(_same(x, y) for x, y in zip(ours, theirs, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return bool(a == b)
