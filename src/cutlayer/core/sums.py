"""Weighted sums over clients, and the norms of what is summed."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.tree import Tree
from cutlayer.core.values import Block, PerClient, aligned

Weights = Mapping[int, float]


def weighted_sum(rows: PerClient, weights: Weights, largest_integers: bool) -> Tree:
    """Return the weighted sum of the rows, block by block; integers are summed, too, or their maximum is taken."""
    total: Tree = None
    scratch: Tree = None  # reused: allocating a tensor for every product would cost more than the product
    for block in rows.blocks:
        if not largest_integers:
            block = block._replace(tree=tree.map(_as_number, block.tree))
        own = [float(weights[j]) for j in block.ids]
        if total is None:
            total = _contracted(block, own)
        elif block.stacked:
            total = tree.map(_plus, total, _contracted(block, own))
        else:
            scratch = tree.map(torch.empty_like, total) if scratch is None else scratch
            total = tree.map(partial(_added, weight=sum(own)), total, block.tree, scratch)
    return total


def _as_number(a: Tensor) -> Tensor:
    return a if a.is_floating_point() else a.double()


def _contracted(block: Block, weights: list[float]) -> Tree:
    def stacked(a: Tensor) -> Tensor:
        if not a.is_floating_point():
            return a.amax(0)
        summed: Tensor = torch.tensordot(torch.tensor(weights, dtype=a.dtype, device=a.device), a, 1)
        return summed

    def same(a: Tensor) -> Tensor:
        return a * sum(weights) if a.is_floating_point() else a.clone()

    return tree.map(stacked if block.stacked else same, block.tree)


def _added(total: Tensor, a: Tensor, scratch: Tensor, *, weight: float) -> Tensor:
    """Add a times its weight to the total, in place: this module owns the total."""
    return total.add_(torch.mul(a, weight, out=scratch)) if a.is_floating_point() else torch.maximum(total, a)


def _plus(a: Tensor, b: Tensor) -> Tensor:
    return a + b if a.is_floating_point() else torch.maximum(a, b)


def norms(rows: PerClient, start: PerClient | None) -> Tensor:
    """Return the norm of each row's change since the start, or of the row itself, in the order of the clients.

    It is in single precision, so that of a change that is too large to be averaged is infinite; it is NaN if a number
    is not finite. Integers do not count.
    """
    found: list[Tensor] = []
    order: list[int] = []
    for ids, blocks in aligned([rows] if start is None else [rows, start], rows.ids):
        stacked = any(b.stacked for b in blocks)
        pairs = zip(*(tree.tensors(b.tree) for b in blocks), strict=True)
        changes = [_change(stacked, *pair) for pair in pairs if pair[0].is_floating_point()]
        norm = _norm(torch.cat(changes, -1)) if changes else torch.zeros(())
        found.append(norm if stacked and changes else norm.expand(len(ids)))
        order += ids
    each = torch.cat(found)
    if tuple(order) == rows.ids:
        return each
    at = {j: k for k, j in enumerate(order)}
    return each[torch.tensor([at[j] for j in rows.ids], device=each.device)]


def _change(stacked: bool, a: Tensor, start: Tensor | None = None) -> Tensor:
    change = a if start is None else a - start
    return change.flatten(1) if stacked else change.flatten()


def _norm(change: Tensor) -> Tensor:
    largest = torch.linalg.vector_norm(change, torch.inf, dim=-1)
    return torch.where(largest.isfinite(), torch.linalg.vector_norm(change.float(), dim=-1), torch.nan)
