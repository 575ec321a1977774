"""What engines have in common."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.batches import Index, Samples
from cutlayer.core.engine import Engine, Fn, Ids
from cutlayer.core.sums import Weights, norms, weighted_sum
from cutlayer.core.transfer import upload
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient


class ByClient:
    """The defaults of engines that put each client's values into a block of its own."""

    def keys(self, keys: Mapping[int, int]) -> PerClient:
        return PerClient("anywhere", one_by_one({j: torch.tensor(key) for j, key in keys.items()}))

    def arrange(self, rows: Mapping[int, Tree]) -> list[Block]:
        return one_by_one(rows)


class AtOnce(ByClient):
    """The defaults of engines that compute a value as soon as it is asked for."""

    def once(self, fn: Fn, values: Sequence[Any]) -> Any:
        return fn(*values)

    def combine(self, rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
        return weighted_sum(rows, weights, largest_integers)

    def norms(self, rows: PerClient, start: PerClient | None) -> Tensor:
        return norms(rows, start)

    def real(self, value: Tree) -> Tree:
        return value

    def forget(self) -> None:
        pass

    def recover(self, error: BaseException, attempt: int) -> Engine:
        raise error


def one_by_one(rows: Mapping[int, Tree]) -> list[Block]:
    """Return one block per client."""
    return [Block((j,), value, stacked=False) for j, value in rows.items()]


def homes(values: Sequence[PerClient]) -> list[dict[int, Block]]:
    """Return, for each value, the block of each client."""
    return [{j: block for block in v.blocks for j in block.ids} for v in values]


def alike(looks: Mapping[int, Hashable], most: int | None = None) -> list[Ids]:
    """Group the clients that look alike, at most so many in a group."""
    groups: dict[Hashable, list[int]] = {}
    for j, look in looks.items():
        groups.setdefault(look, []).append(j)
    most = most or max(len(looks), 1)
    return [tuple(g[k : k + most]) for g in groups.values() for k in range(0, len(g), most)]


def load_stacked(data: Samples, index: Mapping[int, Index], most: int | None = None) -> tuple[PerClient, PerClient]:
    """Load inputs and labels, stacking the batches of equal size, at most so many in a stack."""
    x, y = [], []
    for ids in alike({j: len(i) for j, i in index.items()}, most):
        rows = upload(np.stack([index[j] for j in ids]), torch.int64, data.y.device)
        x.append(Block(ids, tree.map(lambda a, rows=rows: a[rows], data.x), stacked=True))
        y.append(Block(ids, data.y[rows], stacked=True))
    return PerClient("clients", x, index), PerClient("clients", y, index)
