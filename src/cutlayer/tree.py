"""Trees: nested dicts, tuples and named tuples whose leaves are tensors, plain scalars or None.

Plain scalars and None are structure, not data: they stay as they are under `map`, so a learning rate or a step count
is an ordinary Python number on every engine.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

Tree = Any


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
    def look(self) -> Hashable:
        """What all values that look alike have in common; quicker to compare than what they look like."""
        raise NotImplementedError


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply fn to the tensors of a tree, beside the same places of the other trees."""
    if isinstance(tree, Tensor):
        return fn(tree, *rest)
    if isinstance(tree, dict):
        return {k: map(fn, v, *(r[k] for r in rest)) for k, v in tree.items()}
    if isinstance(tree, tuple):
        return rebuild(tree, [map(fn, v, *(r[i] for r in rest)) for i, v in enumerate(tree)])
    if isinstance(tree, Pending):
        return map(fn, tree.bare, *rest)
    return tree


def rebuild(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple of the same kind, named or not."""
    return like._make(items) if hasattr(like, "_make") else tuple(items)


def leaves(tree: Tree) -> Iterator[Any]:
    """Every leaf, tensors and scalars alike, in a fixed order."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple):
        for value in tree:
            yield from leaves(value)
    elif isinstance(tree, Pending):
        yield from leaves(tree.bare)
    elif tree is not None:
        yield tree


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
