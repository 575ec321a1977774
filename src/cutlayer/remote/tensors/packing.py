"""Tensors as bytes: unchanged, as bfloat16, or as int8 with one scale for each sample.

`bf16` rounds to the nearest bfloat16: the relative error is at most 2^-8 for values that are normal in float32. `int8`
multiplies integers from -127 to 127 by a scale, which is the largest magnitude of the sample divided by 127: the error
is at most half the scale. A value that is not finite stays so, and with `int8` makes its whole sample not finite; this
includes float64 values beyond the range of float32. float16 is not offered, because 98 % of the gradients at a cut are
subnormal in it.
"""

from functools import partial
from math import prod

import torch
from torch import Tensor

from cutlayer import registry
from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import Packing, TensorForm

_NAMES = ("float64", "float32", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
PACKED = ("float32", "float64")  # types that bf16 and int8 can pack
MOST_BYTES = 2**62  # torch's sizes are 64-bit integers
SENT_AS = {"bf16": torch.bfloat16, "int8": torch.int8}
_SCALE = torch.float32
_TINY = torch.finfo(_SCALE).tiny


def form_of(tensor: Tensor, packing: Packing = "raw") -> TensorForm:
    """Return type, shape and packing of a tensor; raise WireError if it cannot travel so."""
    form = TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), packing)
    num_bytes(form)
    return form


def num_bytes(form: TensorForm) -> int:
    """Return the length of the packed tensor; raise WireError for a form that no tensor can have."""
    dtype = DTYPES.get(form.dtype)
    if dtype is None:
        raise WireError(f"a tensor of {form.dtype!r} does not travel; those that do: {', '.join(DTYPES)}")
    if form.packing != "raw" and form.dtype not in PACKED:
        raise WireError(f"a tensor of {form.dtype} cannot be packed as {form.packing}; only {' and '.join(PACKED)} can")
    # Strides count empty dimensions as one, so these products must fit even if the tensor holds nothing.
    if prod(max(size, 1) for size in form.shape) * dtype.itemsize > MOST_BYTES:
        raise WireError(f"a tensor of shape {form.shape} is larger than any memory")
    return prod(form.shape) * SENT_AS.get(form.packing, dtype).itemsize + _num_scales(form) * _SCALE.itemsize


def pack(tensor: Tensor, how: Packing) -> Tensor:
    """Return the bytes of a tensor on the CPU, as a view if they need not change."""
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
    """Return the tensor whose bytes begin at the offset; a raw one is a view of the buffer."""
    dtype, number = DTYPES[form.dtype], prod(form.shape)
    if not number:  # torch.frombuffer takes no empty buffer
        return torch.empty(form.shape, dtype=dtype)
    rows = _num_scales(form)
    values = _raw(buffer, offset + rows * _SCALE.itemsize, SENT_AS.get(form.packing, dtype), number)
    if rows:
        values = values.reshape(rows, -1) * _raw(buffer, offset, _SCALE, rows).to(dtype)[:, None]
    return values.to(dtype).reshape(form.shape)


def _num_scales(form: TensorForm) -> int:
    """Return how many scales come before the values: with int8, one for each sample."""
    if form.packing != "int8" or not prod(form.shape):
        return 0
    return form.shape[0] if form.shape else 1


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _quantise(tensor: Tensor) -> Tensor:
    """Return the scales, then the values. Scales are normal floats, because a subnormal one would be too coarse."""
    rows = tensor.reshape(len(tensor) if tensor.dim() else 1, -1)
    scales = (rows.abs().amax(1) / 127).to(_SCALE).clamp(min=_TINY)
    values = (rows / scales[:, None].to(rows.dtype)).round().nan_to_num(nan=0.0).clamp(-127, 127)
    return torch.cat([_bytes(scales), _bytes(values.to(torch.int8))])


def _raw(buffer: bytearray, offset: int, dtype: torch.dtype, number: int) -> Tensor:
    # In torch, a bool with any other byte has undefined behaviour.
    if dtype == torch.bool and _raw(buffer, offset, torch.uint8, number).max() > 1:
        raise WireError("a tensor of bool has bytes other than 0 and 1")
    return torch.frombuffer(buffer, dtype=dtype, count=number, offset=offset)
