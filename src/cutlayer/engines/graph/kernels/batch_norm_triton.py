"""Triton kernels for batch normalisation: two forwards and two backwards, or one each if a channel has few numbers.

Images that lie channels last are a matrix with a row for each pixel and a column for each channel. The first kernel of
a pass splits the matrix into pieces, some rows of some channels each, and stores the statistics of each piece: mean and
sum of squared deviations, or the two sums that the gradient needs. The second kernel works on pieces, too: each program
combines the statistics of its channels and writes its own rows; the programs of the first rows also write the values
per channel. Means and deviations are combined directly, not from sums of squares, whose difference would lose digits.
There are no atomic additions and no sizes chosen by timing, so the same input gives the same bits.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 32  # of a piece: 64 contiguous bytes of bfloat16
CHANNELS_AT_ONCE = 16  # if a program takes all rows of its channels; fewer channels make more programs
TILE = 4096  # numbers that a program holds at a time: 16 for each thread
WARPS = 8
ROWS_AT_ONCE = 1024  # up to so many rows, one kernel does the whole pass
PIECES = 64  # programs of a kernel, about: fewer than a GPU has processors, as other kernels run beside it


@triton.jit
def _inside(rows, stop, columns, C: tl.constexpr, BC: tl.constexpr):
    """Return the mask of the numbers of a tile that exist."""
    inside = (rows < stop)[:, None]
    if C % BC:
        inside = inside & (columns < C)[None, :]
    return inside


@triton.jit
def _moments(x, columns, start, stop, C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, T: tl.constexpr):
    """Return mean and sum of squared deviations of each channel over some rows, first for each place of the tile."""
    lane = tl.arange(0, BR)
    mean = tl.zeros((BR, BC), dtype=T)
    squares = tl.zeros((BR, BC), dtype=T)
    seen = tl.zeros((BR, 1), dtype=T)
    for first in range(start, stop, BR):
        rows = first + lane
        inside = _inside(rows, stop, columns, C, BC)
        values = tl.load(x + rows[:, None] * C + columns[None, :], mask=inside, other=0.0).to(T)
        there = (rows < stop)[:, None]
        seen += there.to(T)
        off = tl.where(there, values - mean, 0.0)
        mean += off * (1.0 / tl.maximum(seen, 1.0))
        squares += off * tl.where(there, values - mean, 0.0)
    joint = tl.sum(seen * mean, axis=0) / (stop - start).to(T)
    apart = mean - joint[None, :]
    return joint, tl.sum(squares + seen * apart * apart, axis=0)


@triton.jit
def _joined_moments(
    means, squares, columns, M, chunk, C: tl.constexpr, BC: tl.constexpr, G: tl.constexpr, T: tl.constexpr
):
    """Combine the moments of the pieces into those of all rows."""
    piece = tl.arange(0, G)
    size = tl.maximum(tl.minimum(M - piece * chunk, chunk), 0)
    at = piece[:, None] * C + columns[None, :]
    inside = (size > 0)[:, None] & (columns < C)[None, :]
    own = tl.load(means + at, mask=inside, other=0.0)
    count = size.to(T)[:, None]
    mean = tl.sum(count * own, axis=0) / M.to(T)
    apart = own - mean[None, :]
    return mean, tl.sum(tl.load(squares + at, mask=inside, other=0.0) + count * apart * apart, axis=0)


@triton.jit
def _moments_kernel(x, means, squares, M, chunk, C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, T: tl.constexpr):
    piece = tl.program_id(0)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    start = piece * chunk
    mean, square = _moments(x, columns, start, tl.minimum(start + chunk, M), C, BC, BR, T)
    tl.store(means + piece * C + columns, mean, mask=columns < C)
    tl.store(squares + piece * C + columns, square, mask=columns < C)


@triton.jit
def _normalise_kernel(
    x, residual, weight, bias, running_mean, running_var,
    y, mean_out, rstd_out, new_mean, new_var, means, squares,
    M, chunk,
    momentum: tl.constexpr, eps: tl.constexpr, RELU: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    known = columns < C
    if means is None:
        mean, square = _moments(x, columns, 0, M, C, BC, BR, T)
    else:
        mean, square = _joined_moments(means, squares, columns, M, chunk, C, BC, G, T)
    count = M.to(T)
    rstd = 1.0 / tl.sqrt(square / count + eps)
    if tl.program_id(0) == 0:
        tl.store(mean_out + columns, mean, mask=known)
        tl.store(rstd_out + columns, rstd, mask=known)
        old_mean = tl.load(running_mean + columns, mask=known, other=0.0)
        old_var = tl.load(running_var + columns, mask=known, other=0.0)
        tl.store(new_mean + columns, (1 - momentum) * old_mean + momentum * mean, mask=known)
        tl.store(new_var + columns, (1 - momentum) * old_var + momentum * (square / (count - 1.0)), mask=known)
    scale = rstd * tl.load(weight + columns, mask=known, other=0.0)
    shift = tl.load(bias + columns, mask=known, other=0.0)
    start = tl.program_id(0) * chunk
    stop = tl.minimum(start + chunk, M)
    for first in range(start, stop, BR):
        rows = first + tl.arange(0, BR)
        inside = _inside(rows, stop, columns, C, BC)
        at = rows[:, None] * C + columns[None, :]
        values = tl.load(x + at, mask=inside, other=0.0).to(T)
        values = (values - mean[None, :]) * scale[None, :] + shift[None, :]
        if residual is not None:
            values += tl.load(residual + at, mask=inside, other=0.0).to(T)
        if RELU:
            values = tl.where(values < 0.0, 0.0, values)  # NaN stays NaN
        tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _per_channel(mean, rstd, weight, bias, columns, known):
    """Return mean and 1 / deviation of these channels, and the scale and shift of the layer."""
    own_rstd = tl.load(rstd + columns, mask=known, other=0.0)
    scale = own_rstd * tl.load(weight + columns, mask=known, other=0.0)
    shift = tl.load(bias + columns, mask=known, other=0.0)
    return tl.load(mean + columns, mask=known, other=0.0), own_rstd, scale, shift


@triton.jit
def _tile(
    dy, x, y, dsum, columns, first, stop, mean, scale, shift, RELU: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Return offsets, mask, deviations and the gradient before the ReLU of some rows; with dsum, store that gradient.

    The ReLU blocks the gradient where y, or else the value that y was computed from, is not positive.
    """
    rows = first + tl.arange(0, BR)
    inside = _inside(rows, stop, columns, C, BC)
    at = rows[:, None] * C + columns[None, :]
    centred = tl.load(x + at, mask=inside, other=0.0).to(T) - mean[None, :]
    inner = tl.load(dy + at, mask=inside, other=0.0).to(T)
    if y is not None:
        inner = tl.where(tl.load(y + at, mask=inside, other=0.0).to(T) <= 0.0, 0.0, inner)
    elif RELU:
        inner = tl.where(centred * scale[None, :] + shift[None, :] <= 0.0, 0.0, inner)
    if dsum is not None:
        tl.store(dsum + at, inner.to(dsum.dtype.element_ty), mask=inside)
    return at, inside, centred, inner


@triton.jit
def _sums(
    dy, x, y, dsum, columns, start, stop, mean, scale, shift, RELU: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sum the gradient, and the gradient times the deviation, over some rows; with dsum, store the gradient."""
    plain = tl.zeros((BR, BC), dtype=T)
    times = tl.zeros((BR, BC), dtype=T)
    for first in range(start, stop, BR):
        _, _, centred, inner = _tile(dy, x, y, dsum, columns, first, stop, mean, scale, shift, RELU, C, BC, BR, T)
        plain += inner
        times += inner * centred
    return tl.sum(plain, axis=0), tl.sum(times, axis=0)


@triton.jit
def _sums_kernel(
    dy, x, y, weight, bias, mean_in, rstd_in, dsum, plains, products, M, chunk, RELU: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    known = columns < C
    mean, _, scale, shift = _per_channel(mean_in, rstd_in, weight, bias, columns, known)
    start = piece * chunk
    stop = tl.minimum(start + chunk, M)
    plain, times = _sums(dy, x, y, dsum, columns, start, stop, mean, scale, shift, RELU, C, BC, BR, T)
    tl.store(plains + piece * C + columns, plain, mask=known)
    tl.store(products + piece * C + columns, times, mask=known)


@triton.jit
def _gradient_kernel(
    dy, x, y, weight, bias, mean_in, rstd_in, dx, dsum, dweight, dbias, plains, products, M, chunk,
    pieces, RELU: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, G: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    known = columns < C
    mean, rstd, scale, shift = _per_channel(mean_in, rstd_in, weight, bias, columns, known)
    if plains is None:
        plain, times = _sums(dy, x, y, None, columns, 0, M, mean, scale, shift, RELU, C, BC, BR, T)
    else:
        piece = tl.arange(0, G)
        found = piece[:, None] * C + columns[None, :]
        there = (piece < pieces)[:, None] & known[None, :]
        plain = tl.sum(tl.load(plains + found, mask=there, other=0.0), axis=0)
        times = tl.sum(tl.load(products + found, mask=there, other=0.0), axis=0)
    if tl.program_id(0) == 0:
        tl.store(dweight + columns, times * rstd, mask=known)
        tl.store(dbias + columns, plain, mask=known)
    lift = plain / M.to(T)
    slope = times * rstd * rstd / M.to(T)
    start = tl.program_id(0) * chunk
    stop = tl.minimum(start + chunk, M)
    for first in range(start, stop, BR):
        at, inside, centred, inner = _tile(dy, x, y, dsum, columns, first, stop, mean, scale, shift, RELU, C, BC, BR, T)
        values = scale[None, :] * (inner - lift[None, :] - centred * slope[None, :])
        tl.store(dx + at, values.to(dx.dtype.element_ty), mask=inside)


class Cut(NamedTuple):
    """How a matrix is split into pieces."""

    grid: tuple[int, int]  # pieces of rows, pieces of channels
    chunk: int  # rows of a piece
    sizes: dict[str, Any]  # compile-time constants of the kernels


def cut(x: Tensor) -> Cut:
    """Choose the pieces for images of this shape; with few rows, one piece has them all."""
    channels = x.shape[1]
    count = x.numel() // channels
    is_whole = count <= ROWS_AT_ONCE
    wide = min(CHANNELS_AT_ONCE if is_whole else CHANNELS, triton.next_power_of_2(channels))
    across = triton.cdiv(channels, wide)
    tall = min(TILE // wide, triton.next_power_of_2(count))
    tiles = triton.cdiv(count, tall)
    down = 1 if is_whole else min(tiles, max(1, PIECES // across))
    chunk = triton.cdiv(tiles, down) * tall
    down = triton.cdiv(count, chunk)
    kind = tl.float64 if x.dtype == torch.float64 else tl.float32
    return Cut((down, across), chunk, {"C": channels, "BC": wide, "BR": tall, "T": kind, "num_warps": WARPS})


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `cutlayer::batch_norm` of images that lie channels last."""
    (grid, chunk, sizes), count = cut(x), x.numel() // x.shape[1]
    y = torch.empty_like(x, memory_format=torch.channels_last)
    mean, rstd, new_mean, new_var = (torch.empty_like(running_mean) for _ in range(4))
    found: tuple[Tensor | None, Tensor | None] = None, None
    if grid[0] > 1:
        found = _kept(grid[0], mean)
        _moments_kernel[grid](x, *found, count, chunk, **sizes)
    _normalise_kernel[grid](
        x, residual, weight, bias, running_mean, running_var, y, mean, rstd, new_mean, new_var, *found,
        count, chunk, momentum, eps, relu, G=triton.next_power_of_2(grid[0]), **sizes,
    )  # fmt: skip
    return y, mean, rstd, new_mean, new_var


def backward(
    dy: Tensor, x: Tensor, y: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `cutlayer::batch_norm_backward` of images that lie channels last."""
    (grid, chunk, sizes), count = cut(x), x.numel() // x.shape[1]
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    dsum = None if y is None else torch.empty_like(dx)
    dweight, dbias = torch.empty_like(mean), torch.empty_like(mean)
    found: tuple[Tensor | None, Tensor | None] = None, None
    source, seen, kept = dy, y, dsum
    if grid[0] > 1:
        found = _kept(grid[0], mean)
        _sums_kernel[grid](dy, x, y, weight, bias, mean, rstd, dsum, *found, count, chunk, relu, **sizes)
        if dsum is not None:  # it is computed already, so it is read instead of dy and y
            source, seen, kept, relu = dsum, None, None, False
    _gradient_kernel[grid](
        source, x, seen, weight, bias, mean, rstd, dx, kept, dweight, dbias, *found, count, chunk, grid[0], relu,
        G=triton.next_power_of_2(grid[0]), **sizes,
    )  # fmt: skip
    return dx, x.new_empty(0) if dsum is None else dsum, dweight, dbias


def _kept(pieces: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate two numbers for each piece and channel."""
    return like.new_empty(pieces, len(like)), like.new_empty(pieces, len(like))
