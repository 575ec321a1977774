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

    T = WithDefault("T", default=Any)  # the type of a value; Any where it is left out
else:
    T = TypeVar("T")
AnyClass = TypeVar("AnyClass", bound=type)
STORABLE: dict[str, Any] = {}  # by name: the named tuples that checkpoints and messages may hold


def storable(cls: AnyClass) -> AnyClass:
    """Allow values of this class, which has a NamedTuple's `_fields` and `_make`, in checkpoints and messages."""
    if STORABLE.setdefault(cls.__name__, cls) is not cls:
        raise CheckpointError(f"two classes named {cls.__name__!r} cannot both be stored; rename one of them.")
    return cls


class Node:
    """Base class of classes that trees treat as named tuples."""

    __slots__ = ()
    _fields: ClassVar[tuple[str, ...]]

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in self._fields)

    @classmethod
    def _make(cls, items: Iterable[Any]) -> Self:
        return cls(*items)


NESTED = (tuple, list, Node)


class Handle:
    """Stands for a value that is not available here."""

    __slots__ = ()

    def item(self, name: Any) -> "Handle":
        """Return the handle of a field, or of an item of a plain tuple, if such tuples have handles."""
        raise NotImplementedError


class Pending(Handle):
    """A value that an engine has not computed yet; only its structure, types and shapes are known."""

    __slots__ = ()

    @property
    def bare(self) -> Tree:
        """The value with tensors without content."""
        raise NotImplementedError

    @property
    def signature(self) -> Hashable:
        """The signature of the value, without traversing it."""
        raise NotImplementedError


def flatten(tree: Tree) -> tuple[Structure, list[Any]]:
    """Return the structure of a tree, which is hashable, and its leaves (tensors and scalars) in a fixed order."""
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
    """Return the tree of this structure with these leaves."""
    supply = iter(leaves)
    return fill(structure, lambda _: next(supply))


def fill(structure: Structure, leaf: Callable[[type], Any]) -> Tree:
    """Return the tree of this structure; `leaf` makes each leaf, in order, from its type."""
    if structure is None:
        return None
    if isinstance(structure, type):
        return leaf(structure)
    cls, names, items = structure
    values = [fill(item, leaf) for item in items]
    return dict(zip(names, values, strict=True)) if cls is dict else _made(cls, values)


def _class(value: Any) -> Any:
    cls = type(value)
    return cls if cls is list or hasattr(cls, "_make") else tuple  # torch has tuple types that cannot be constructed


def _made(cls: Any, items: list[Any]) -> Any:
    return cls(items) if cls in PLAIN else cls._make(items)


def signature(tree: Tree, *, stacked: bool = False) -> Hashable:
    """Return a key that is equal for trees of equal structure, types and shapes (of a row, if stacked).

    The values of plain numbers do not matter.
    """
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
    """Apply fn to the tensors of a tree and the corresponding values of the other trees."""
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
    """Return the tree with every value of this class replaced by fn(value)."""
    if isinstance(tree, cls):
        return fn(tree)
    if isinstance(tree, dict):
        return {k: replace(cls, fn, v) for k, v in tree.items()}
    return rebuild(tree, [replace(cls, fn, v) for v in tree]) if isinstance(tree, NESTED) else tree


def rebuild(like: Any, items: list[Any]) -> Any:
    """Return a list, tuple or named tuple of the same type with these items."""
    return _made(_class(like), items)


def leaves(tree: Tree) -> list[Any]:
    """Return all leaves, tensors and scalars, in a fixed order."""
    return flatten(tree)[1]


def tensors(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree in a fixed order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def num_bytes(tree: Tree) -> int:
    """Return the bytes on the wire: of tensors their size, 8 for each plain number."""
    return sum(a.numel() * a.element_size() if isinstance(a, Tensor) else 8 for a in leaves(tree))


def where(ok: Tensor, new: Tree, old: Tree) -> Tree:
    """Return `new` where `ok` holds, else `old`, without host synchronisation."""
    return map(lambda a, b: torch.where(ok, a, b), new, old)


def owned(tree: Tree) -> Tree:
    """Copy the values into contiguous memory: the strides of a view may change later rounding."""
    return map(lambda a: a.detach().clone(memory_format=torch.contiguous_format), tree)


def field(tree: Tree, name: Any) -> Tree:
    """Return the field of this name, or the item of this number in a plain tuple."""
    if isinstance(tree, Handle):
        return tree.item(name)
    return tree[name] if isinstance(name, int) else getattr(tree, name)


def bare(tree: Tree) -> Tree:
    """Return the value, or its shapes if it is not computed yet."""
    return tree.bare if isinstance(tree, Pending) else tree


def detach(tree: Tree) -> Tree:
    """Detach all tensors from the autograd graph."""
    return map(lambda a: a.detach(), tree)


def shapes(tree: Tree) -> Tree:
    """Return the tree with tensors without content."""
    return map(lambda a: torch.empty(a.shape, dtype=a.dtype, device="meta"), tree)


def zeros(tree: Tree) -> Tree:
    """Return the tree with zeros on the CPU."""
    return map(lambda a: torch.zeros(a.shape, dtype=a.dtype), tree)


def equal(a: Tree, b: Tree) -> bool:
    """Return whether both trees are equal to the last bit, on the same device."""
    if a is b:
        return True
    (structure, ours), (other, theirs) = flatten(a), flatten(b)
    return structure == other and all(_same(x, y) for x, y in zip(ours, theirs, strict=True))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
    return bool(a == b)
