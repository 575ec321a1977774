"""Trees on the wire: a skeleton, which is the same at every step, and beside it the numbers and tensors in order."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.skeleton import decode, encode
from cutlayer.core.tree import Structure, Tree
from cutlayer.errors import WireError
from cutlayer.remote.protocol.commands import Skeleton

MOST_DEPTH = 16
MOST_ITEMS = 100_000  # of all that one skeleton names
Numbers = Callable[[], int | float]
Tensors = Callable[[], Tensor]


class Flat(NamedTuple):
    """A tree taken apart."""

    structure: Structure
    numbers: list[int | float]
    tensors: list[Tensor]

    @property
    def skeleton(self) -> Skeleton:
        return encode(self.structure)

    def tree(self) -> Tree:
        """Together again."""
        return filled(self.structure, iter(self.numbers).__next__, iter(self.tensors).__next__)


def flatten(value: Tree) -> Flat:
    """The structure of a tree with its numbers and tensors, in order."""
    structure, leaves = tree.flatten(value)
    flat = Flat(structure, [], [])
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            flat.tensors.append(leaf)
        elif isinstance(leaf, tree.NUMBERS):
            flat.numbers.append(leaf)
        else:
            raise WireError(
                f"a {type(leaf).__name__} cannot travel; only tensors, numbers, dicts and tuples of them can"
            )
    return flat


def build(skeleton: Skeleton, number: Numbers, tensor: Tensors) -> Tree:
    """The tree of a skeleton, which takes its numbers and tensors in order. Nothing about the skeleton is trusted."""
    try:
        structure = decode(skeleton, most_depth=MOST_DEPTH, most_items=MOST_ITEMS)
    except ValueError as error:
        raise WireError(str(error)) from None
    return filled(structure, number, tensor)


def filled(structure: Structure, number: Numbers, tensor: Tensors) -> Tree:
    """The tree of a structure, which takes its numbers and tensors in order."""
    return tree.fill(structure, lambda kind: tensor() if kind is Tensor else number())
