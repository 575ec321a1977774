"""The reference: one client after another, plain Python, a debugger works."""

from collections.abc import Mapping, Sequence

import torch

from cutlayer import calculus, tree
from cutlayer.batches import Index
from cutlayer.data.arrays import Arrays
from cutlayer.engines.base import Fn, Ids
from cutlayer.kinds import Place
from cutlayer.tree import Tree
from cutlayer.values import Block, PerClient


class Loop:
    """A block per client."""

    name = "loop"

    def load(self, data: Arrays, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        rows = {j: torch.from_numpy(i) for j, i in index.items()}
        x = {j: tree.map(lambda a, i=i: a[i], data.x) for j, i in rows.items()}
        return _rows("clients", x), _rows("clients", {j: data.y[i] for j, i in rows.items()})

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return _rows("anywhere", keys)

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        return [_block(j, fn(*(v.at(j) for v in values))) for j in ids]

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return [_block(j, calculus.vjp(fn, [v.at(j) for v in values], cut)) for j in ids]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return [_block(j, calculus.gradient(fn, [v.at(j) for v in values], cut)) for j in ids]

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return [_block(j, pullbacks.at(j)(gradient.at(j))) for j in pullbacks.ids]


def _block(j: int, value: Tree) -> Block:
    return Block((j,), value, stacked=False)


def _rows(place: Place, values: Mapping[int, Tree]) -> PerClient:
    return PerClient(place, [_block(j, v) for j, v in values.items()])
