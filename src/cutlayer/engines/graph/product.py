"""Weighted sums over clients whose values lie in the rows of banks: one product for each type of number."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.transfer import upload
from cutlayer.engines.graph.forms import Form, Memory, Path
from cutlayer.engines.graph.lane import Book

Key = tuple[int, Form]  # of a bank


class Member(NamedTuple):
    """A client's value: its bank, its row there, and what it counts."""

    bank: Key
    lane: int
    weight: float


def is_summable(form: Form, largest_integers: bool) -> bool:
    """Whether a product of rows is what the sum of such values should be."""
    only_tensors = all(isinstance(leaf, Tensor) for leaf in tree.leaves(form.bare))
    return only_tensors and (largest_integers or all(d.is_floating_point for d in form.layout.sizes))


def write_sum(members: Iterable[Member], form: Form, path: Path, book: Book, into: Memory) -> None:
    """The weighted sum of the fields at this path, which have this form; of integers the largest."""
    banks: dict[Key, list[Member]] = {}
    for member in members:
        banks.setdefault(member.bank, []).append(member)
    for dtype, total in into.items():
        for k, (bank, own) in enumerate(banks.items()):
            own.sort(key=lambda member: member.lane)
            (place,) = (s for s in bank[1].stretches(form, path) or () if s.dtype == dtype)
            matrix = book.bank(*bank).memory[dtype][:, place.start : place.start + place.size]
            chosen = _rows(matrix, [m.lane for m in own])
            _add(total, chosen, [m.weight for m in own], first=k == 0)


def _add(total: Tensor, rows: Tensor, weights: Sequence[float], *, first: bool) -> None:
    if total.is_floating_point():
        w = upload(weights, total.dtype, total.device)
        torch.addmv(total, rows.t(), w, beta=0 if first else 1, out=total)
    else:
        largest = rows.amax(0)
        total.copy_(largest if first else torch.maximum(total, largest))


def _rows(matrix: Tensor, lanes: list[int]) -> Tensor:
    """The rows of these lanes; neighbours without a copy."""
    if lanes == list(range(lanes[0], lanes[0] + len(lanes))):
        return matrix[lanes[0] : lanes[0] + len(lanes)]
    return matrix.index_select(0, upload(lanes, torch.int64, matrix.device))
