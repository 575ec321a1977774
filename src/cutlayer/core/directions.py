"""Shared random directions: the same numbers, bit for bit, on every device and engine, from nothing but a seed.

A direction is a standard normal vector over named parameters. Number k of a seed is a function of the two alone (a
counter-based generator), so nothing is stored and any stretch can be made again. Only integer arithmetic and +, -, x
and / of float64 are used: IEEE 754 prescribes their every bit, while `log`, `cos`, a fused multiply-add or, on some
GPUs, even `sqrt` may differ from one device, library or compiler to the next. Each step is therefore a tensor operation
of its own.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutlayer.core.state import Tensors

# Numbers that are made at a time: so many fit a CPU's cache, and fill a GPU. The bits do not depend on it.
STRETCH = {"cpu": 1 << 15}
LONG_STRETCH = 1 << 19

MASK32 = (1 << 32) - 1
# Stafford's variant 13 of the MurmurHash3 finaliser, as in SplitMix64 (Steele, Lea and Flood 2014); signed 64 bits.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)

HALF_EXPONENT = 0x1FF7A3BEA91D9B1B  # half the bits of 1.0, less what makes a straight line between powers of 4 fit best
LOG2 = 0.6931471805599453  # written out: a library's logarithm is not the same everywhere


def seeds(key: int, num: int) -> Tensor:
    """So many seeds from a key; they travel as 8 bytes each."""
    return mixed(torch.tensor(key) + GOLDEN * torch.arange(1, num + 1))


def child(seed: Tensor, number: int) -> Tensor:
    """The seed of a direction that has nothing in common with its parent's or its siblings'."""
    return mixed(mixed(seed) + (GOLDEN * (number + 1) + (1 << 63)) % (1 << 64) - (1 << 63))


def shifted(params: Tensors, seed: Tensor, size: float) -> Tensors:
    """The parameters moved by `size` along the direction of a seed, in memory of their own."""
    flat = torch.cat([u[0].to(_dtype(params)) for u in _stretches(seed[None], params)])
    return {name: p + size * u for (name, p), u in zip(params.items(), _taken_apart(flat, params), strict=True)}


def combined(like: Tensors, seeds: Tensor, factors: Tensor) -> Tensors:
    """The directions of the seeds times their factors (float64), added in the order of the seeds."""
    sums = []
    for stretch in _stretches(seeds, like):
        total = stretch[0] * factors[0]
        for u, factor in zip(stretch[1:], factors[1:], strict=True):
            total = total + u * factor
        sums.append(total.to(_dtype(like)))
    return dict(zip(like, _taken_apart(torch.cat(sums), like), strict=True))


def _stretches(seeds: Tensor, like: Tensors) -> Iterator[Tensor]:
    """The directions of all seeds side by side, stretch by stretch, over the parameters as one vector."""
    length = sum(p.numel() for p in like.values())
    device = next((p.device for p in like.values()), torch.device("cpu"))
    stretch = max(2, STRETCH.get(device.type, LONG_STRETCH) // len(seeds) // 2 * 2)
    seeds = seeds.to(device)[:, None]
    if not length:
        yield torch.zeros(len(seeds), 0, dtype=torch.float64, device=device)
    for start in range(0, length, stretch):
        yield normals(seeds, start, min(start + stretch, length))


def _dtype(like: Tensors) -> torch.dtype:
    """A type that loses nothing of any of them."""
    return functools.reduce(torch.promote_types, (p.dtype for p in like.values()), torch.float16)


def _taken_apart(flat: Tensor, like: Tensors) -> list[Tensor]:
    """One vector as tensors of these shapes and types."""
    pieces = torch.split(flat, [p.numel() for p in like.values()])
    return [piece.reshape(p.shape).to(p.dtype) for piece, p in zip(pieces, like.values(), strict=True)]


def normals(seed: Tensor, start: int, stop: int) -> Tensor:
    """Numbers start to stop of a seed, standard normal, float64; `start` is even. Seeds may have a last axis of 1.

    Box and Muller (1958): a pair of uniform numbers, one 64-bit hash, makes a pair of normal ones.
    """
    pairs = torch.arange(start // 2, (stop + 1) // 2, device=seed.device)
    bits = mixed(mixed(seed) + GOLDEN * pairs)
    radius = sqrt(0.0 - 2.0 * log((_high(bits) + 1).double() / 2.0**32))  # of +0 for the logarithm of 1, never of -0
    sine, cosine = sine_and_cosine((bits & MASK32).double() / 2.0**32)
    pair = torch.stack((radius * cosine, radius * sine), dim=-1)
    return pair.flatten(-2)[..., : stop - start]


def mixed(z: Tensor) -> Tensor:
    """A bijection of 64-bit integers that spreads every bit over all others; sums and products wrap around."""
    z = (z ^ _shifted_right(z, 30)) * MIX1
    z = (z ^ _shifted_right(z, 27)) * MIX2
    return z ^ _shifted_right(z, 31)


def _shifted_right(z: Tensor, bits: int) -> Tensor:
    """Zeros come in from the left, whatever the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _high(bits: Tensor) -> Tensor:
    return _shifted_right(bits, 32)


def log(x: Tensor) -> Tensor:
    """Natural logarithm of float64 numbers in (0, 1], to about 1e-15.

    x = m 2^e with m in [0.70, 1.41), and log m = 2 artanh(s) with s = (m - 1) / (m + 1), as a series in s².
    """
    half = 0x3FE6A09E00000000  # the bits of 0.7071...: numbers from there to twice that keep the exponent 0
    bits = _seen_as(x, torch.int64)
    exponent = (bits - half) >> 52
    m = _seen_as(bits - (exponent << 52), torch.float64)
    s = (m - 1.0) / (m + 1.0)
    return exponent.double() * LOG2 + 2.0 * s * _polynomial(s * s, [1 / (2 * k + 1) for k in range(10)])


def sqrt(x: Tensor) -> Tensor:
    """Square root of float64 numbers, to about 1e-15: Newton's iteration from half the exponent; of 0, next to 0."""
    root = _seen_as((_seen_as(x, torch.int64) >> 1) + HALF_EXPONENT, torch.float64)
    for _ in range(4):  # 0.035, 6e-4, 2e-7, 2e-14 and 2e-28 of relative error, but for rounding
        root = (root + x / root) * 0.5
    return root


class _View(torch.autograd.Function):
    """The same bits as numbers of another type. `vmap` cannot do that with `Tensor.view` in torch 2.11 and before."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is differentiated here."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int | None]:
        return _seen_as(x, dtype), in_dims[0]


def _seen_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    seen: Tensor = _View.apply(x, dtype)  # type: ignore[no-untyped-call]
    return seen


def sine_and_cosine(turns: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of float64 angles in [0, 1) turns, to about 1e-15: Taylor series within an eighth of a turn."""
    quarter = torch.floor(turns * 4.0 + 0.5)
    angle = (turns - quarter / 4.0) * (2 * math.pi)
    square = angle * angle
    sine = angle * _polynomial(square, [(-1) ** k / math.factorial(2 * k + 1) for k in range(9)])
    cosine = _polynomial(square, [(-1) ** k / math.factorial(2 * k) for k in range(9)])
    turned = quarter.long() % 4
    swapped, negative_sine, negative_cosine = turned % 2 == 1, turned >= 2, (turned == 1) | (turned == 2)
    sine, cosine = torch.where(swapped, cosine, sine), torch.where(swapped, sine, cosine)
    return torch.where(negative_sine, -sine, sine), torch.where(negative_cosine, -cosine, cosine)


def _polynomial(x: Tensor, coefficients: list[float]) -> Tensor:
    """Horner's scheme, each product and sum rounded by itself."""
    total = x * coefficients[-1]
    for c in reversed(coefficients[1:-1]):
        total = (total + c) * x
    return total + coefficients[0]
