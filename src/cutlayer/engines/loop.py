"""The reference engine: one client after another, in plain Python, so a debugger works."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from cutlayer.core import calculus, tree
from cutlayer.core.batches import Index, Samples
from cutlayer.core.engine import Fn, Ids
from cutlayer.core.values import Block, PerClient, aligned
from cutlayer.engines.base import AtOnce, homes, one_by_one


class Loop(AtOnce):
    """Computes one client after another; each has a block of its own."""

    name = "loop"

    def load(self, data: Samples, index: Mapping[int, Index]) -> tuple[PerClient, PerClient]:
        rows = {j: torch.from_numpy(i) for j, i in index.items()}
        x = {j: tree.map(lambda a, i=i: a[i], data.x) for j, i in rows.items()}
        y = {j: data.y[i] for j, i in rows.items()}
        return PerClient("clients", one_by_one(x)), PerClient("clients", one_by_one(y))

    def call(self, fn: Fn, values: Sequence[PerClient], ids: Ids) -> list[Block]:
        """Call fn for one client after another, but only once for clients with the very same values: fn is pure."""
        made: list[Block] = []
        for group, blocks in aligned(values, ids):
            if any(b.stacked for b in blocks):
                made += one_by_one({j: fn(*(b.row(j) for b in blocks)) for j in group})
            else:
                made.append(Block(group, fn(*(b.tree for b in blocks)), stacked=False))
        return made

    def vjp(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        made = one_by_one({j: calculus.vjp(fn, own, cut) for j, own in _own(values, ids)})
        return [b._replace(tree=(b.tree[0], calculus.Pullback(b.tree[1], b.ids))) for b in made]

    def grad(self, fn: Fn, values: Sequence[PerClient], ids: Ids, *, cut: int | None) -> list[Block]:
        return one_by_one({j: calculus.gradient(fn, own, cut) for j, own in _own(values, ids)})

    def pull(self, pullbacks: PerClient, gradient: PerClient) -> list[Block]:
        return one_by_one({j: own.pull(g) for j, (own, g) in _own((pullbacks, gradient), pullbacks.ids)})


def _own(values: Sequence[PerClient], ids: Ids) -> Iterator[tuple[int, list[Any]]]:
    """Yield each client with its own arguments."""
    blocks = homes(values)
    return ((j, [home[j].row(j) for home in blocks]) for j in ids)
