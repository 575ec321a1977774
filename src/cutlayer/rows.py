"""Tensors that lie side by side in one row of memory, so that an update of all of them is one operation on the row.

Engines that keep clients' values in rows hand them out as `Rows`; optimisers work on the rows where they find them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cutlayer.state import Grads, Part, Tensors

KERNEL_DIMENSIONS = 4  # of a convolution over images
ALIGNMENT = 16  # bytes: what matrix units ask of the tensors that they read


class Place(NamedTuple):
    """Where a tensor lies in the row of its type."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_kernel(self) -> bool:
        return len(self.shape) == KERNEL_DIMENSIONS and self.shape[0] > 1

    def of(self, row: Tensor) -> Tensor:
        return row.as_strided(self.shape, self.strides, row.storage_offset() + self.start)


class Rows(dict[str, Tensor]):
    """Named tensors that are views of rows, one row a type."""

    def __init__(self, rows: Mapping[torch.dtype, Tensor], places: Mapping[str, Place]) -> None:
        super().__init__({name: place.of(rows[place.dtype]) for name, place in places.items()})
        self.rows, self.places = rows, places

    def like(self, rows: Mapping[torch.dtype, Tensor]) -> "Rows":
        """The same names in other rows."""
        return Rows(rows, self.places)

    def clone(self) -> Tensors:
        """Copies that lie side by side, too; to autograd, a change of one in place is no change of the others."""
        copies = self.like({dtype: row.clone() for dtype, row in self.rows.items()})
        return {name: value.data for name, value in copies.items()}

    def leaves(self, kernels: torch.dtype | None) -> Tensors:
        """The tensors to differentiate by; with a type, kernels of convolutions in it, converted at once.

        They are many, and autocast converts each of them; others it may leave alone: matrices such as embeddings, and
        scales or positions that are spread over all samples. With one output, a kernel cannot be told from these.
        """
        kept = {name: value.detach() for name, value in self.items()}
        if kernels is not None:
            for dtype, row in self.rows.items():
                own = [(n, p) for n, p in self.places.items() if p.dtype == dtype and p.is_kernel]
                converted = row.to(kernels) if own else row
                kept |= {name: place.of(converted) for name, place in own}
        return {name: value.requires_grad_() for name, value in kept.items()}

    def gathered(self, values: Tensors) -> Tensors:
        """Copies of these values, of the same names, side by side in new rows."""
        rows = {dtype: torch.empty_like(row) for dtype, row in self.rows.items()}
        copies = self.like(rows)
        for dtype, row in rows.items():
            for start, end in self._gaps(dtype, len(row)):
                row[start:end].zero_()
        for dtype in {value.dtype for value in values.values()}:
            names = [name for name, value in values.items() if value.dtype == dtype]
            torch._foreach_copy_([copies[n] for n in names], [values[n] for n in names])
        return copies

    def _gaps(self, dtype: torch.dtype, size: int) -> list[tuple[int, int]]:
        """Stretches of the row between its tensors, which count as zeros."""
        own = [place for place in self.places.values() if place.dtype == dtype]
        ends = [0, *(place.start + place.size for place in own)]
        return [(end, start) for end, start in zip(ends, [*(p.start for p in own), size], strict=True) if start > end]

    def packed(self, values: Tensors) -> Mapping[torch.dtype, Tensor]:
        """These values, of the same names, as such rows: the rows that they lie in already, or copies."""
        if isinstance(values, Rows) and values.places == self.places:
            return values.rows
        return {dtype: self._packed(dtype, row, values) for dtype, row in self.rows.items()}

    def _packed(self, dtype: torch.dtype, row: Tensor, values: Tensors) -> Tensor:
        own = [(values[name], place) for name, place in self.places.items() if place.dtype == dtype]
        first = own[0][0]
        if all(_lies_in_such_a_row(value, at, first, row) for value, at in own):
            return first.as_strided(row.shape, (1,), 0)
        gaps = dict(self._gaps(dtype, len(row)))  # by where they start
        zeros = row.new_zeros(max((end - start for start, end in gaps.items()), default=0))
        pieces: list[Tensor] = [zeros[: gaps[0]]] if 0 in gaps else []
        for value, at in own:
            end = at.start + at.size
            pieces += [_flat(value.to(dtype), at), *([zeros[: gaps[end] - end]] if end in gaps else [])]
        return torch.cat(pieces)


def _lies_in_such_a_row(value: Tensor, at: Place, first: Tensor, row: Tensor) -> bool:
    """Whether a value lies at its place in memory that is one such row, the same as that of the first value."""
    memory = value.untyped_storage()
    return (
        value.dtype == at.dtype
        and memory.data_ptr() == first.untyped_storage().data_ptr()
        and memory.nbytes() == row.numel() * row.element_size()
        and value.storage_offset() == at.start
        and value.stride() == at.strides
    )


def _flat(value: Tensor, at: Place) -> Tensor:
    """The numbers of a value in the order in which they lie at this place."""
    order = sorted(range(value.dim()), key=lambda d: -at.strides[d])
    return value.permute(order).reshape(-1)


def fits(part: Part, grads: Grads) -> bool:
    """Whether the part lies in rows, all of one order, and every value of it has a gradient."""
    kept = (part.params, *part.moments.values(), *([part.start] if part.start else []))
    return (
        isinstance(part.params, Rows)
        and bool(part.params)
        and all(tuple(values) == tuple(part.params) for values in kept)
        and grads.params.keys() == part.params.keys()
    )


def together(part: Part, grads: Grads) -> tuple[Part, Grads]:
    """The part and its gradients with one row for all tensors of a type."""
    rows = _rows_of(part.params)
    packed = part._replace(
        params=_named(rows.packed(part.params)),
        moments={kind: _named(rows.packed(of_kind)) for kind, of_kind in part.moments.items()},
        start=_named(rows.packed(part.start)) if part.start else {},
    )
    gradients = grads._replace(params=_named(rows.packed(grads.params)))
    if isinstance(part.buffers, Rows) and part.buffers and part.buffers.keys() == grads.buffers.keys():
        packed = packed._replace(buffers=_named(part.buffers.packed(part.buffers)))
        gradients = gradients._replace(buffers=_named(part.buffers.packed(grads.buffers)))
    return packed, gradients


def within(part: Part) -> tuple[Tensors, dict[str, Tensors]]:
    """The rows themselves that hold the parameters and the moments of a part."""
    rows_of = {kind: _named(_rows_of(of_kind).rows) for kind, of_kind in part.moments.items()}
    return _named(_rows_of(part.params).rows), rows_of


def apart(packed: Part, part: Part) -> Part:
    """The packed part with the names of the part that it was made of."""
    rows = _rows_of(part.params)
    buffers = packed.buffers
    if isinstance(part.buffers, Rows) and buffers.keys() != part.buffers.keys():
        buffers = part.buffers.like(_by_type(buffers))
    return packed._replace(
        params=rows.like(_by_type(packed.params)),
        buffers=buffers,
        moments={kind: rows.like(_by_type(of_kind)) for kind, of_kind in packed.moments.items()},
        frozen=part.frozen,
        start=part.start,
    )


def _rows_of(params: Tensors) -> Rows:
    assert isinstance(params, Rows)
    return params


def _named(rows: Mapping[torch.dtype, Tensor]) -> Tensors:
    return {str(dtype): row for dtype, row in rows.items()}


def _by_type(named: Tensors) -> dict[torch.dtype, Tensor]:
    return {row.dtype: row for row in named.values()}
