"""Weighted sums over clients whose values lie in rows: one matrix-vector product for each dtype."""

from collections.abc import Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from cutlayer.core import tree
from cutlayer.core.transfer import upload
from cutlayer.engines.graph.forms import Form, Memory, Path
from cutlayer.engines.graph.lane import Book

Bank = tuple[int, Form]  # the number and the form that name a bank


def is_summable(form: Form, largest_integers: bool) -> bool:
    """Whether a product of rows gives the sum of such values."""
    only_tensors = all(isinstance(leaf, Tensor) for leaf in tree.leaves(form.bare))
    return only_tensors and (largest_integers or all(d.is_floating_point for d in form.layout.sizes))


def write_sum(banks: Mapping[Bank, list[tuple[int, float]]], form: Form, path: Path, book: Book, into: Memory) -> None:
    """Write the weighted sum of the fields at this path, which have this form; of integers, write the largest.

    `banks` has the lane and the weight of every value, by the bank that it lies in.
    """
    for dtype, total in into.items():
        for k, (bank, members) in enumerate(banks.items()):
            lanes, weights = zip(*sorted(members, key=itemgetter(0)), strict=True)
            (place,) = (s for s in bank[1].stretches(form, path) or () if s.dtype == dtype)
            matrix = book.bank(*bank)[dtype][:, place.start : place.start + place.size]
            _add(total, _rows(matrix, list(lanes)), weights, first=k == 0)


def _add(total: Tensor, rows: Tensor, weights: Sequence[float], *, first: bool) -> None:
    if total.is_floating_point():
        w = upload(weights, total.dtype, total.device)
        torch.addmv(total, rows.t(), w, beta=0 if first else 1, out=total)
    else:
        largest = rows.amax(0)
        total.copy_(largest if first else torch.maximum(total, largest))


def _rows(matrix: Tensor, lanes: list[int]) -> Tensor:
    """Return the rows of these lanes, as a view if they are adjacent."""
    if lanes == list(range(lanes[0], lanes[0] + len(lanes))):
        return matrix[lanes[0] : lanes[0] + len(lanes)]
    return matrix.index_select(0, upload(lanes, torch.int64, matrix.device))
