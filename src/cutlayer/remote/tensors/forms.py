"""Tensors as bytes, unchanged."""

from math import prod

import torch
from torch import Tensor

from cutlayer.errors import WireError
from cutlayer.remote.protocol.messages import TensorForm

_NAMES = ("float64", "float32", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
MOST_BYTES = 2**62  # torch's sizes are 64-bit integers


def form_of(tensor: Tensor) -> TensorForm:
    """Return type and shape of a tensor; raise WireError if it cannot travel."""
    form = TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    num_bytes(form)
    return form


def num_bytes(form: TensorForm) -> int:
    """Return the length of the tensor; raise WireError for a form that no tensor can have."""
    dtype = DTYPES.get(form.dtype)
    if dtype is None:
        raise WireError(f"a tensor of {form.dtype!r} does not travel; those that do: {', '.join(DTYPES)}")
    # Strides count empty dimensions as one, so these products must fit even if the tensor holds nothing.
    if prod(max(size, 1) for size in form.shape) * dtype.itemsize > MOST_BYTES:
        raise WireError(f"a tensor of shape {form.shape} is larger than any memory")
    return prod(form.shape) * dtype.itemsize


def content(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on the CPU, as a view if possible."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def view(buffer: bytearray, offset: int, form: TensorForm) -> Tensor:
    """Return the tensor whose bytes begin at the offset, as a view of the buffer."""
    dtype, number = DTYPES[form.dtype], prod(form.shape)
    if not number:  # torch.frombuffer takes no empty buffer
        return torch.empty(form.shape, dtype=dtype)
    # In torch, a bool with any other byte has undefined behaviour.
    if dtype == torch.bool and torch.frombuffer(buffer, dtype=torch.uint8, count=number, offset=offset).max() > 1:
        raise WireError("a tensor of bool has bytes other than 0 and 1")
    return torch.frombuffer(buffer, dtype=dtype, count=number, offset=offset).reshape(form.shape)
