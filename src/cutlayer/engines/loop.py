"""The reference: one client after another, plain Python, a debugger works."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cutlayer.core import calculus, tree
from cutlayer.core.batches import Index, Samples
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.kinds import Place
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient, aligned
from cutlayer.engines.base import AtOnce


class Loop(AtOnce):
    """A block per client."""

    name = "loop"

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        rows = {j: torch.from_numpy(i) for j, i in index.items()}
        x = {j: tree.map(lambda a, i=i: a[i], data.x) for j, i in rows.items()}
        return _rows("clients", x), _rows("clients", {j: data.y[i] for j, i in rows.items()})

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return _rows("anywhere", keys)

    def seeds(self, keys: Mapping[int, int]) -> PerClient:
        return _rows("anywhere", {j: torch.tensor(key) for j, key in keys.items()})

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """One client after another; for clients whose values are one and the same, once: fn is pure."""
        if all(len(b.ids) == 1 for v in values for b in v.blocks):
            return [_block(j, fn(*own)) for j, own in _one_by_one(values, ids)]
        made: list[Block] = []
        for group, blocks in aligned(values, ids):
            if not any(b.stacked for b in blocks):
                made.append(Block(group, fn(*(b.tree for b in blocks)), stacked=False))
            else:
                made += [_block(j, fn(*(b.row(j) for b in blocks))) for j in group]
        return made

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return [_block(j, _with_pullback(j, *calculus.vjp(fn, own, cut))) for j, own in _one_by_one(values, ids)]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return [_block(j, calculus.gradient(fn, own, cut)) for j, own in _one_by_one(values, ids)]

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return [_block(j, own.pull(g)) for j, (own, g) in _one_by_one((pullbacks, gradient), pullbacks.ids)]


def _with_pullback(j: int, out: Tensor, pull: calculus.Pull) -> tuple[Tensor, calculus.Pullback]:
    return out, calculus.Pullback(pull, (j,))


def _one_by_one(values: Sequence[PerClient], ids: Ids) -> Iterator[tuple[int, list[Any]]]:
    """Each client with its own arguments."""
    homes = [{j: block for block in v.blocks for j in block.ids} for v in values]
    return ((j, [home[j].row(j) for home in homes]) for j in ids)


def _block(j: int, value: Tree) -> Block:
    return Block((j,), value, stacked=False)


def _rows(place: Place, values: Mapping[int, Tree]) -> PerClient:
    return PerClient(place, [_block(j, v) for j, v in values.items()])
