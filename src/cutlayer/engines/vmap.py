"""Clients of equal shapes stacked and computed side by side with `torch.func.vmap`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.func import vmap

from cutlayer import calculus, tree
from cutlayer.batches import Index
from cutlayer.data.arrays import Arrays
from cutlayer.engines.base import AtOnce, Fn, Ids
from cutlayer.tree import Tree
from cutlayer.values import Block, PerClient, aligned, shared


class Vmap(AtOnce):
    """A block per shape, of at most `chunk` clients. What is the same for all clients is computed once."""

    name = "vmap"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk

    def load(self, data: Arrays, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        x, y = [], []
        for ids in self._equal_lengths(index):
            rows = torch.from_numpy(np.stack([index[j] for j in ids]))
            x.append(Block(ids, tree.map(lambda a, rows=rows: a[rows], data.x), stacked=True))
            y.append(Block(ids, data.y[rows], stacked=True))
        return PerClient("clients", x, index), PerClient("clients", y, index)

    def _equal_lengths(self, index: Mapping[int, Index]) -> list[Ids]:
        groups: dict[int, list[int]] = {}
        for j, i in index.items():
            groups.setdefault(len(i), []).append(j)
        chunk = self.chunk or max(len(index), 1)
        return [tuple(g[k : k + chunk]) for g in groups.values() for k in range(0, len(g), chunk)]

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        """None: a model that draws random numbers runs on the loop engine."""
        return shared("anywhere", tuple(keys), None)

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        return PerClient("anywhere", [Block(tuple(keys), torch.tensor(list(keys.values())), stacked=True)])

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        return [self._call(fn, group, blocks) for group, blocks in aligned(values, ids)]

    def _call(self, fn: Fn, ids: Ids, blocks: list[Block]) -> Block:
        if not any(b.stacked and tree.tensors(b.tree) for b in blocks):  # an empty client has nothing to stack
            return Block(ids, fn(*(b.tree for b in blocks)), stacked=False)
        if len(ids) == 1:
            return Block(ids, fn(*(b.row(ids[0]) for b in blocks)), stacked=False)
        # Running statistics are updated in place, so each client needs its own, also where all start from the same.
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

        # Each client differentiates its own copy, also where all start from the same one.
        return Block(ids, how(run, [b.wide() for b in blocks], cut), stacked=True)

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        """A pullback belongs to its whole group, so gradients that were made one by one are stacked again."""
        return [self._pulled(b, gradient) for b in pullbacks.blocks]

    def _pulled(self, block: Block, gradient: PerClient) -> Block:
        pull, ids = block.tree
        if not block.stacked:
            return block._replace(tree=pull(gradient.at(ids[0])))
        return Block(ids, pull(_together(gradient, ids)), stacked=True).take(block.ids)


def _together(value: PerClient, ids: Ids) -> torch.Tensor:
    """The rows of these clients stacked; zeros for one that has vanished since."""
    for block in value.blocks:
        if block.ids == ids:
            whole: torch.Tensor = block.wide()
            return whole
    rows = {j: value.at(j) for j in ids if j in value.ids}
    absent = torch.zeros_like(next(iter(rows.values())))
    return torch.stack([rows.get(j, absent) for j in ids])


def side_by_side(fn: Fn, trees: Sequence[Tree], stacked: Sequence[bool]) -> Tree:
    """fn over the leading axis of the stacked trees; plain numbers and None in them are the same for all."""
    flat = [tree.tensors(t) for t in trees]
    dims = tuple(0 if s else None for s, tensors in zip(stacked, flat, strict=True) for _ in tensors)
    shape: list[Tree] = []

    def over_tensors(*tensors: torch.Tensor) -> Any:
        supply = iter(tensors)
        out = fn(*(tree.map(lambda _: next(supply), t) for t in trees))
        shape.append(out)
        return tuple(tree.tensors(out))

    outputs = iter(vmap(over_tensors, in_dims=dims)(*(a for tensors in flat for a in tensors)))
    return tree.map(lambda _: next(outputs), shape[-1])
