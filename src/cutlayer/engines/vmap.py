"""Stack clients of equal shapes and compute them side by side with `torch.func.vmap`."""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.func import vmap

from cutlayer.core import calculus, tree
from cutlayer.core.batches import Index, Samples
from cutlayer.core.checks import reason
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient, aligned
from cutlayer.engines.base import AtOnce, alike, load_stacked
from cutlayer.engines.out_of_memory import out_of_memory
from cutlayer.errors import ConfigError

# How torch words that vmap cannot run an operation. It has no exception of its own for that, so only the message tells
# it from a mistake in the function.
REFUSAL = re.compile(r"vmap|functorch|batching rule|Tensor that doesn't have storage", re.IGNORECASE)


class Unstackable(ConfigError):
    """A function that vmap cannot run for several clients at once."""

    def __init__(self, why: str) -> None:
        super().__init__(f"engine vmap cannot stack what this method computes ({why}); use engine = 'loop'")
        self.why = why


class Vmap(AtOnce):
    """Computes stacks of at most `chunk` clients of equal shapes. A value that all share is computed once."""

    name = "vmap"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        return load_stacked(data, index, self.chunk)

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return PerClient("anywhere", [Block(tuple(keys), torch.tensor(list(keys.values())), stacked=True)])

    def arrange(self, rows: Mapping[int, Tree]) -> list[Block]:
        """Stack values of equal shapes."""
        looks = {j: (tree.signature(value), _numbers(value)) for j, value in rows.items()}
        return [_stacked(ids, [rows[j] for j in ids]) for ids in alike(looks, self.chunk)]

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        return [self._call(fn, group, blocks) for group, blocks in aligned(values, ids)]

    def _call(self, fn: Fn, ids: Ids, blocks: list[Block]) -> Block:
        if not any(b.stacked and tree.tensors(b.tree) for b in blocks):  # an empty client has nothing to stack
            return Block(ids, fn(*(b.tree for b in blocks)), stacked=False)
        if len(ids) == 1:
            return Block(ids, fn(*(b.row(ids[0]) for b in blocks)), stacked=False)
        # Running statistics are updated in place, so each client needs its own, even if all start from the same.
        wide = [b.stacked or bool(getattr(b.tree, "buffers", None)) for b in blocks]
        trees = [b.wide() if w else b.tree for b, w in zip(blocks, wide, strict=True)]
        return Block(ids, side_by_side(fn, trees, wide), stacked=True)

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        made = [self._differentiated(calculus.vjp, fn, g, blocks, cut) for g, blocks in aligned(values, ids)]
        return [b._replace(tree=(b.tree[0], calculus.Pullback(b.tree[1], b.ids))) for b in made]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return [self._differentiated(calculus.gradient, fn, g, blocks, cut) for g, blocks in aligned(values, ids)]

    def _differentiated(self, how: Fn, fn: Fn, ids: Ids, blocks: list[Block], cut: int | None) -> Block:
        if len(ids) == 1:
            return Block(ids, how(fn, [b.row(ids[0]) for b in blocks], cut), stacked=False)

        def run(*trees: Tree) -> Tree:
            return side_by_side(fn, trees, [True] * len(trees))

        # Each client differentiates with respect to its own copy, even if all start from the same one.
        return Block(ids, how(run, [b.wide() for b in blocks], cut), stacked=True)

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """Run each pullback on its whole group: gradients that were made one by one are stacked first."""
        return [self._pulled(b, gradient) for b in pullbacks.blocks]

    def _pulled(self, block: Block, gradient: PerClient) -> Block:
        pull, ids = block.tree
        if not block.stacked:
            return block._replace(tree=pull(gradient.at(ids[0])))
        return Block(ids, pull(_together(gradient, ids)), stacked=True).take(block.ids)


def _numbers(value: Tree) -> Hashable:
    """Return the plain numbers of a value, which must be equal for all clients of a stack."""
    return tuple(a for a in tree.leaves(value) if not isinstance(a, torch.Tensor))


def _stacked(ids: Ids, values: list[Tree]) -> Block:
    if len(ids) == 1 or not tree.tensors(values[0]):
        return Block(ids, values[0], stacked=False)
    return Block(ids, tree.map(lambda *tensors: torch.stack(tensors), *values), stacked=True)


def _together(value: PerClient, ids: Ids) -> Tree:
    """Stack the rows of these clients, with zeros for a client that was lost since."""
    for block in value.blocks:
        if block.ids == ids:
            return block.wide()
    rows = {j: value.at(j) for j in ids if j in value.ids}
    absent = tree.map(torch.zeros_like, next(iter(rows.values())))
    return tree.map(lambda *tensors: torch.stack(tensors), *(rows.get(j, absent) for j in ids))


def side_by_side(fn: Fn, trees: Sequence[Tree], stacked: Sequence[bool]) -> Tree:
    """Map fn over the leading axis of the stacked trees; their plain numbers and Nones are the same for all rows.

    An operation that vmap cannot run raises `Unstackable`; other errors of fn come through as they are.
    """
    flat = [tree.tensors(t) for t in trees]
    dims = tuple(0 if s else None for s, tensors in zip(stacked, flat, strict=True) for _ in tensors)
    shape: list[Tree] = []

    def over_tensors(*tensors: torch.Tensor) -> Any:
        supply = iter(tensors)
        out = fn(*(tree.map(lambda _: next(supply), t) for t in trees))
        shape.append(out)
        return tuple(tree.tensors(out))

    try:
        outputs = iter(vmap(over_tensors, in_dims=dims)(*(a for tensors in flat for a in tensors)))
    except (RuntimeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        if out_of_memory(error) or not REFUSAL.search(str(error)):
            raise
        raise Unstackable(reason(error)) from error
    return tree.map(lambda _: next(outputs), shape[-1])
