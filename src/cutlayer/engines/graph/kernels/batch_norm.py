"""Batch normalisation of images in training, fused with the sum with a shortcut and the ReLU that often follow it.

Torch's compiler can compile around these operations. On a GPU they are Triton kernels, elsewhere plain formulas. Both
compute in float32 (float64 for float64) and round once, at the end. Results are channels last.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

IMAGES = (0, 2, 3)  # the dimensions over which statistics are computed
Normalised = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # y, mean, 1 / deviation, and the two new running values
Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # of x, of the sum before the ReLU, of weight and of bias
LAST = torch.channels_last
LARGEST = 2**31  # numbers in a tensor up to which the kernels' 32-bit indices suffice


def computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which statistics of values of this dtype are computed and kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@custom_op("cutlayer::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    relu: bool,
) -> Normalised:
    """Normalise a batch of images; the running values are not written, new ones are returned."""
    if residual is not None:
        residual = residual.contiguous(memory_format=LAST)
    running = running_mean.contiguous(), running_var.contiguous()
    given = x.contiguous(memory_format=LAST), residual, weight.contiguous(), bias.contiguous(), *running
    if _has_kernels(x):
        from cutlayer.engines.graph.kernels import batch_norm_triton

        with torch.cuda.device(x.device):
            return batch_norm_triton.forward(*given, momentum, eps, relu)
    return plain_forward(*given, momentum, eps, relu)


@custom_op("cutlayer::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, relu: bool
) -> Gradients:
    """Return the gradients. With y, the ReLU's mask is read from y, and the gradient of the sum is returned, too.

    Without y, nothing was added: the mask is computed from x, and the second gradient is empty.
    """
    if y is not None:
        y = y.contiguous(memory_format=LAST)
    images = dy.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)
    given = *images, y, weight.contiguous(), bias.contiguous(), mean, rstd
    if _has_kernels(x):
        from cutlayer.engines.graph.kernels import batch_norm_triton

        with torch.cuda.device(x.device):
            return batch_norm_triton.backward(*given, relu)
    return plain_backward(*given, relu)


def plain_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    relu: bool,
) -> Normalised:
    """Compute the forward pass by plain torch operations."""
    values = x.to(computed_in(x.dtype))
    mean, count = values.mean(IMAGES), x.numel() // x.shape[1]
    centred = values - _wide(mean)
    var = centred.square().mean(IMAGES)
    rstd = (var + eps).rsqrt()
    y = centred * _wide(rstd * weight) + _wide(bias)
    if residual is not None:
        y = y + residual
    if relu:
        y = y.relu()
    new_mean = (1 - momentum) * running_mean + momentum * mean
    new_var = (1 - momentum) * running_var + momentum * (count / (count - 1)) * var
    return _laid_out(y, x), mean, rstd, new_mean, new_var


def plain_backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, relu: bool
) -> Gradients:
    """Compute the backward pass by plain torch operations."""
    centred = x.to(mean.dtype) - _wide(mean)
    hat = centred * _wide(rstd)
    inner = dy.to(mean.dtype)
    if relu:
        stood_still = (centred * _wide(rstd * weight) + _wide(bias) if y is None else y) <= 0
        inner = inner.masked_fill(stood_still, 0)  # NaN passes, as in torch
    dbias, dweight = inner.sum(IMAGES), (inner * hat).sum(IMAGES)
    count = x.numel() // x.shape[1]
    dx = _wide(weight * rstd) * (inner - _wide(dbias / count) - hat * _wide(dweight / count))
    dsum = x.new_empty(0) if y is None else _laid_out(inner, x)
    return _laid_out(dx, x), dsum, dweight, dbias


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.numel() < LARGEST


def _wide(per_channel: Tensor) -> Tensor:
    return per_channel[:, None, None]


def _laid_out(values: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=LAST).copy_(values)


@batch_norm.register_fake
def _(x: Tensor, residual: Tensor | None, weight: Tensor, *_: Any) -> Normalised:
    mean, rstd, new_mean, new_var = (weight.new_empty(x.shape[1], dtype=computed_in(x.dtype)) for _ in range(4))
    return torch.empty_like(x, memory_format=LAST), mean, rstd, new_mean, new_var


@batch_norm_backward.register_fake
def _(dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, *_: Any) -> Gradients:
    dx = torch.empty_like(x, memory_format=LAST)
    dsum = x.new_empty(0) if y is None else torch.empty_like(dx)
    dweight, dbias = (weight.new_empty(x.shape[1], dtype=computed_in(x.dtype)) for _ in range(2))
    return dx, dsum, dweight, dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Normalised) -> None:
    x, residual, weight, bias, *_, relu = inputs
    y, mean, rstd, *running = output
    ctx.mark_non_differentiable(mean, rstd, *running)
    ctx.relu, ctx.adds = relu, residual is not None
    ctx.save_for_backward(x, y if relu and ctx.adds else None, weight, bias, mean, rstd)


def _differentiate(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    dy = dy.contiguous(memory_format=LAST)  # here, where the compiler can fuse it with what makes dy
    dx, dsum, dweight, dbias = batch_norm_backward(dy, *ctx.saved_tensors, ctx.relu)
    added = (dsum if ctx.relu else dy) if ctx.adds else None
    return dx, added, dweight, dbias, None, None, None, None, None


batch_norm.register_autograd(_differentiate, setup_context=_keep)
