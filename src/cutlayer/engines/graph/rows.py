"""Named tensors side by side in one row of memory, so that updating all of them is one operation on the row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cutlayer.core import named
from cutlayer.core.precision import is_in_bfloat16
from cutlayer.core.state import Grads, Part, Tensors
from cutlayer.core.torch_private import foreach_copy_

KERNEL_DIMENSIONS = 4  # of the weights of a convolution over images
ALIGNMENT = 16  # bytes; matrix units need aligned tensors


@dataclass(frozen=True, slots=True)
class Position:
    """Where a tensor lies in the row of its dtype."""

    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def end(self) -> int:
        """The first place at which the next tensor of the row may begin."""
        step = max(1, ALIGNMENT // self.dtype.itemsize)
        return self.start + -(-self.size // step) * step

    @property
    def is_kernel(self) -> bool:
        return len(self.shape) == KERNEL_DIMENSIONS and self.shape[0] > 1

    def of(self, row: Tensor) -> Tensor:
        return row.as_strided(self.shape, self.strides, row.storage_offset() + self.start)


class Rows(dict[str, Tensor]):
    """Named tensors that are views of rows, one row for each dtype."""

    def __init__(self, rows: Mapping[torch.dtype, Tensor], positions: Mapping[str, Position]) -> None:
        super().__init__({name: place.of(rows[place.dtype]) for name, place in positions.items()})
        self.rows, self.positions = rows, positions

    def clone(self) -> Tensors:
        """Return copies, also side by side. For autograd, changing one in place does not change the others."""
        copies = Rows({dtype: row.clone() for dtype, row in self.rows.items()}, self.positions)
        return {name: value.data for name, value in copies.items()}

    def leaves(self, kernels: torch.dtype | None) -> Tensors:
        """Return the tensors to differentiate with respect to; with a dtype, convolution kernels are converted to it.

        All kernels are converted in one operation, where autocast would convert each by itself. Other tensors stay as
        they are, as autocast may not convert them: matrices such as embeddings, and scales or positions that are
        broadcast over all samples. A kernel with one output channel looks like these, so it stays as it is, too.
        """
        kept = {name: value.detach() for name, value in self.items()}
        if kernels is not None:
            for dtype, row in self.rows.items():
                own = [(n, p) for n, p in self.positions.items() if p.dtype == dtype and p.is_kernel]
                converted = row.to(kernels) if own else row
                kept |= {name: place.of(converted) for name, place in own}
        return {name: value.requires_grad_() for name, value in kept.items()}

    def gathered(self, values: Tensors) -> Tensors:
        """Copy values of the same names into new rows."""
        rows = {dtype: torch.empty_like(row) for dtype, row in self.rows.items()}
        copies = Rows(rows, self.positions)
        for dtype, row in rows.items():
            for start, end in self._gaps(dtype, len(row)):
                row[start:end].zero_()
        copy_all([copies[name] for name in values], list(values.values()))
        return copies

    def _gaps(self, dtype: torch.dtype, size: int) -> list[tuple[int, int]]:
        """Return the gaps between the tensors of a row, which must hold zeros."""
        own = [place for place in self.positions.values() if place.dtype == dtype]
        ends = [0, *(place.start + place.size for place in own)]
        return [(end, start) for end, start in zip(ends, [*(p.start for p in own), size], strict=True) if start > end]

    def packed(self, values: Tensors) -> Mapping[torch.dtype, Tensor]:
        """Return values of the same names as rows: the rows that they lie in already, or copies."""
        if isinstance(values, Rows) and values.positions == self.positions:
            return values.rows
        return {dtype: self._packed(dtype, row, values) for dtype, row in self.rows.items()}

    def _packed(self, dtype: torch.dtype, row: Tensor, values: Tensors) -> Tensor:
        own = [(values[name], place) for name, place in self.positions.items() if place.dtype == dtype]
        first = own[0][0]
        if all(_lies_in_such_a_row(value, at, first, row) for value, at in own):
            return first.as_strided(row.shape, (1,), 0)
        gaps = dict(self._gaps(dtype, len(row)))  # from start to end
        zeros = row.new_zeros(max((end - start for start, end in gaps.items()), default=0))
        pieces: list[Tensor] = [zeros[: gaps[0]]] if 0 in gaps else []
        for value, at in own:
            end = at.start + at.size
            pieces += [_flat(value.to(dtype), at), *([zeros[: gaps[end] - end]] if end in gaps else [])]
        return torch.cat(pieces)


def _lies_in_such_a_row(value: Tensor, at: Position, first: Tensor, row: Tensor) -> bool:
    """Whether a value lies at its position in a row like this one, the same row as the first value."""
    memory = value.untyped_storage()
    return (
        value.dtype == at.dtype
        and memory.data_ptr() == first.untyped_storage().data_ptr()
        and memory.nbytes() == row.numel() * row.element_size()
        and value.storage_offset() == at.start
        and value.stride() == at.strides
    )


def _flat(value: Tensor, at: Position) -> Tensor:
    """Return the numbers of a value in the order in which they lie at this position."""
    order = sorted(range(value.dim()), key=lambda d: -at.strides[d])
    return value.permute(order).reshape(-1)


def copy_all(into: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """Copy each tensor of `of` into its counterpart, all tensors of equal types in one operation."""
    types = [(there.dtype, here.dtype) for there, here in zip(into, of, strict=True)]
    for own in dict.fromkeys(types):
        chosen = [k for k, types_of_k in enumerate(types) if types_of_k == own]
        foreach_copy_([into[k] for k in chosen], [of[k] for k in chosen])


@named.leaves.register
def _(params: Rows) -> Tensors:
    return params.leaves(torch.bfloat16 if is_in_bfloat16() else None)


@named.typed.register
def _(params: Rows, gradients: Tensors) -> Tensors:
    return params.gathered(gradients) if len(gradients) == len(params) else named.typed(dict(params), gradients)


@named.copies.register
def _(values: Rows, names: tuple[str, ...]) -> Tensors:
    return values.clone() if tuple(values) == names else named.copies(dict(values), names)


def fits(part: Part, grads: Grads) -> bool:
    """Whether the part lies in rows with the same order of names, and every parameter has a gradient."""
    kept = (part.params, *part.moments.values(), *([part.start] if part.start else []))
    return (
        isinstance(part.params, Rows)
        and bool(part.params)
        and all(tuple(values) == tuple(part.params) for values in kept)
        and grads.params.keys() == part.params.keys()
    )


def together(part: Part, grads: Grads) -> tuple[Part, Grads]:
    """Return what changes of a part, and its gradients, with one row for all tensors of a dtype."""
    packed = part._replace(
        params=_packed(part.params, part.params),
        frozen={},
        moments={kind: _packed(part.params, of_kind) for kind, of_kind in part.moments.items()},
        start=_packed(part.params, part.start) if part.start else {},
    )
    gradients = grads._replace(params=_packed(part.params, grads.params))
    if isinstance(part.buffers, Rows) and part.buffers and part.buffers.keys() == grads.buffers.keys():
        packed = packed._replace(buffers=_packed(part.buffers, part.buffers))
        gradients = gradients._replace(buffers=_packed(part.buffers, grads.buffers))
    return packed, gradients


def within(part: Part) -> tuple[Tensors, dict[str, Tensors]]:
    """Return the rows that hold the parameters and the moments of a part."""
    moments = {kind: _packed(of_kind, of_kind) for kind, of_kind in part.moments.items()}
    return _packed(part.params, part.params), moments


def apart(packed: Part, part: Part) -> Part:
    """Undo `together`: return the packed part with the names of the original part."""
    buffers = packed.buffers
    if isinstance(part.buffers, Rows) and buffers.keys() != part.buffers.keys():
        buffers = _unpacked(part.buffers, buffers)
    return packed._replace(
        params=_unpacked(part.params, packed.params),
        buffers=buffers,
        moments={kind: _unpacked(part.params, of_kind) for kind, of_kind in packed.moments.items()},
        frozen=part.frozen,
        start=part.start,
    )


def _packed(like: Tensors, values: Tensors) -> Tensors:
    """Return values as rows laid out like the others, by the name of the dtype."""
    assert isinstance(like, Rows)
    return {str(dtype): row for dtype, row in like.packed(values).items()}


def _unpacked(like: Tensors, rows: Tensors) -> Rows:
    assert isinstance(like, Rows)
    return Rows({row.dtype: row for row in rows.values()}, like.positions)
