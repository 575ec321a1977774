"""Trees on the wire: a skeleton, which is the same at every step, and beside it the numbers and tensors in order."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

import cutlayer.stored  # noqa: F401  (messages may hold these)
from cutlayer.checkpoint import known_class
from cutlayer.errors import CheckpointError, WireError
from cutlayer.tree import Tree

# None, "tensor", "number", or a list: ["dict", names, skeletons], ["tuple", skeletons], [class name, skeletons].
Skeleton = Any
MOST_DEPTH = 16
MOST_ITEMS = 100_000  # of all that one skeleton names


class Flat(NamedTuple):
    """A tree taken apart."""

    skeleton: Skeleton
    numbers: list[int | float]
    tensors: list[Tensor]

    def tree(self) -> Tree:
        """Together again."""
        return build(self.skeleton, iter(self.numbers).__next__, iter(self.tensors).__next__)


def flatten(tree: Tree) -> Flat:
    """The skeleton of a tree with its numbers and tensors, in order."""
    flat = Flat(None, [], [])
    return flat._replace(skeleton=_strip(tree, flat))


def _strip(value: Tree, flat: Flat) -> Skeleton:
    if value is None:
        return None
    if isinstance(value, Tensor):
        flat.tensors.append(value)
        return "tensor"
    if isinstance(value, int | float):
        flat.numbers.append(value)
        return "number"
    if isinstance(value, dict):
        return ["dict", list(value), [_strip(v, flat) for v in value.values()]]
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else "tuple"
        return [name, [_strip(v, flat) for v in value]]
    raise WireError(f"a {type(value).__name__} cannot travel; only tensors, numbers, dicts and tuples of them can")


Numbers = Callable[[], int | float]
Tensors = Callable[[], Tensor]


def build(skeleton: Skeleton, number: Numbers, tensor: Tensors) -> Tree:
    """The tree of a skeleton, which takes its numbers and tensors in order. Nothing about the skeleton is trusted."""
    return _build(skeleton, number, tensor, iter(range(MOST_ITEMS)), 0)


def _build(skeleton: Skeleton, number: Numbers, tensor: Tensors, budget: Iterator[int], depth: int) -> Tree:
    if depth > MOST_DEPTH or next(budget, None) is None:
        raise WireError(f"a value is nested deeper than {MOST_DEPTH} or has more than {MOST_ITEMS} items")

    def below(items: Any) -> list[Tree]:
        if not isinstance(items, list | tuple):
            raise WireError("a skeleton has no list where its items should be")
        return [_build(item, number, tensor, budget, depth + 1) for item in items]

    match skeleton:
        case None:
            return None
        case "tensor":
            return tensor()
        case "number":
            return number()
        case ["dict", [*names], items]:
            values = below(items)
            if not all(isinstance(n, str) for n in names) or not len(set(names)) == len(names) == len(values):
                raise WireError("a dict needs one value for each of its names, which are different texts")
            return dict(zip(names, values, strict=True))
        case ["tuple", items]:
            return tuple(below(items))
        case [str(name), items]:
            return _named(name, below(items))
    raise WireError("a skeleton is none of those that a value can have")


def _named(name: str, values: list[Tree]) -> Tree:
    try:
        cls = known_class(name)
    except CheckpointError as error:
        raise WireError(str(error)) from None
    if len(values) != len(cls._fields):
        raise WireError(f"a {name} has {len(cls._fields)} fields, but {len(values)} came")
    return cls._make(values)
