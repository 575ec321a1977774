"""Trees on the wire: a skeleton, which is the same at every step, then the numbers and tensors in order."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.skeleton import Skeleton, decode, encode
from cutlayer.core.tree import Structure, Tree
from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import Sent

MOST_DEPTH = 16
MOST_ITEMS = 100_000  # in one skeleton
LEAVES = {"tensor": Tensor, "number": float}
CONTAINERS = {"tuple": tuple}  # besides dicts and storable classes
Numbers = Callable[[], int | float]
Tensors = Callable[[], Tensor]


class Flat(NamedTuple):
    """A tree as its structure, numbers and tensors."""

    structure: Structure
    numbers: list[int | float]
    tensors: list[Tensor]

    @property
    def skeleton(self) -> Skeleton:
        return _encoded(self.structure)

    def tree(self) -> Tree:
        """Return the tree."""
        return filled(self.structure, iter(self.numbers).__next__, iter(self.tensors).__next__)


def flatten(value: Tree) -> Flat:
    """Take a tree apart into its structure, numbers and tensors."""
    structure, leaves = tree.flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *tree.NUMBERS)):
            raise _not_sent(type(leaf))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return Flat(structure, [leaf for leaf in leaves if not isinstance(leaf, Tensor)], tensors)


def sendable(token: int, number: int, value: Tree) -> tuple[Sent, list[Tensor]]:
    """Return the message that carries a value, and the tensors that go with it."""
    flat = flatten(value)
    return Sent(token=token, number=number, tree=flat.skeleton, numbers=tuple(flat.numbers)), flat.tensors


def build(skeleton: Skeleton, number: Numbers, tensor: Tensors) -> Tree:
    """Build the tree of a skeleton, about which nothing is trusted, from numbers and tensors in order."""
    try:
        structure = decode(skeleton, leaves=LEAVES, containers=CONTAINERS, most_depth=MOST_DEPTH, most_items=MOST_ITEMS)
    except ValueError as error:
        raise WireError(str(error)) from None
    return filled(structure, number, tensor)


def filled(structure: Structure, number: Numbers, tensor: Tensors) -> Tree:
    """Build the tree of a structure from numbers and tensors in order."""
    return tree.fill(structure, lambda kind: tensor() if kind is Tensor else number())


@lru_cache(1024)
def _encoded(structure: Structure) -> Skeleton:
    if _holds_list(structure):
        raise _not_sent(list)
    return encode(structure)


def _holds_list(structure: Structure) -> bool:
    return isinstance(structure, tuple) and (structure[0] is list or any(map(_holds_list, structure[2])))


def _not_sent(kind: type) -> WireError:
    return WireError(f"a {kind.__name__} cannot travel; only tensors, numbers, dicts and tuples of them can")
