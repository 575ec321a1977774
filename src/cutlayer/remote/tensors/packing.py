"""Tensors as bytes: as they are, as bfloat16, or as int8 with one scale for each sample.

`bf16` rounds to the nearest bfloat16: the relative error is at most 2^-8 for values that are normal in float32. `int8`
multiplies whole numbers from -127 to 127 by a scale, which is the largest magnitude of the sample over 127: the error
is at most half of it. What is not finite comes out not finite, and takes its whole sample along with `int8`; the same
holds for float64 beyond the range of float32. float16 has no place here: 98 % of the gradients at a cut are subnormal
in it.
"""

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from cutlayer import registry
from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import Packing, TensorForm

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
PACKED = ("float32", "float64")  # what may be packed as bf16 or int8
MOST_BYTES = 2**62  # beyond it torch cannot count
_SCALE = torch.float32
_TINY = torch.finfo(_SCALE).tiny


def form_of(tensor: Tensor, packing: Packing = "raw") -> TensorForm:
    """How this tensor travels."""
    form = TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), packing)
    num_bytes(form)
    return form


def num_bytes(form: TensorForm) -> int:
    """The length of the packed tensor; a form that no tensor can have is refused."""
    dtype = DTYPES.get(form.dtype)
    if dtype is None:
        raise WireError(f"a tensor of {form.dtype!r} does not travel; those that do: {', '.join(DTYPES)}")
    if form.packing != "raw" and form.dtype not in PACKED:
        raise WireError(f"a tensor of {form.dtype} cannot be packed as {form.packing}; only {' and '.join(PACKED)} can")
    # Strides count empty dimensions as one, so these products must fit even if the tensor holds nothing.
    if prod(max(size, 1) for size in form.shape) * dtype.itemsize > MOST_BYTES:
        raise WireError(f"a tensor of shape {form.shape} is larger than any memory")
    number = prod(form.shape)
    match form.packing:
        case "raw":
            return number * dtype.itemsize
        case "bf16":
            return number * torch.bfloat16.itemsize
        case "int8":
            return number + _rows(form.shape) * _SCALE.itemsize if number else 0


def pack(tensor: Tensor, how: Packing) -> Tensor:
    """The bytes of a tensor, on the CPU; a view of it where nothing has to be done."""
    tensor = tensor.detach()
    if how == "int8" and tensor.numel():
        return _quantise(tensor).cpu()
    return _bytes(tensor.bfloat16() if how == "bf16" else tensor).cpu()


ABOUT: dict[Packing, str] = {
    "raw": "tensors as they are",
    "bf16": "rounded to bfloat16: half the bytes of float32",
    "int8": "whole numbers, and a scale for each sample: a quarter of the bytes of float32",
}
CODECS = registry.table("CODECS", {how: partial(pack, how=how) for how in ABOUT})


def unpack(buffer: bytearray, offset: int, form: TensorForm) -> Tensor:
    """The tensor whose bytes begin there; a view of the buffer if it is raw."""
    dtype, number = DTYPES[form.dtype], prod(form.shape)
    if not number:  # torch.frombuffer takes no empty buffer
        return torch.empty(form.shape, dtype=dtype)
    match form.packing:
        case "raw":
            return _raw(buffer, offset, dtype, number).reshape(form.shape)
        case "bf16":
            return _raw(buffer, offset, torch.bfloat16, number).to(dtype).reshape(form.shape)
        case "int8":
            rows = _rows(form.shape)
            scales = _raw(buffer, offset, _SCALE, rows).to(dtype)
            values = _raw(buffer, offset + rows * _SCALE.itemsize, torch.int8, number)
            return (values.reshape(rows, -1) * scales[:, None]).reshape(form.shape)


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _quantise(tensor: Tensor) -> Tensor:
    """Scales, then values. A subnormal scale would be too coarse, so none is smaller than the smallest normal one."""
    rows = tensor.reshape(_rows(tensor.shape), -1)
    scales = (rows.abs().amax(1) / 127).to(_SCALE).clamp(min=_TINY)
    values = (rows / scales[:, None].to(rows.dtype)).round().nan_to_num(nan=0.0).clamp(-127, 127)
    return torch.cat([_bytes(scales), _bytes(values.to(torch.int8))])


def _raw(buffer: bytearray, offset: int, dtype: torch.dtype, number: int) -> Tensor:
    # With any other byte, what torch computes with a bool is undefined.
    if dtype == torch.bool and _raw(buffer, offset, torch.uint8, number).max() > 1:
        raise WireError("a tensor of bool has bytes other than 0 and 1")
    return torch.frombuffer(buffer, dtype=dtype, count=number, offset=offset)
