"""Shared random directions: from a seed alone, the same numbers on every device and engine, bit for bit.

A direction is a standard normal vector over named parameters. Number k of a seed is a function of the two alone (a
counter-based generator), so nothing is stored and any range can be generated again. Only integer arithmetic and +, -,
x and / of float64 are used, because IEEE 754 defines every bit of their results. `log`, `cos`, a fused multiply-add or,
on some GPUs, even `sqrt` may differ between devices, libraries and compilers. So each step is a tensor operation of its
own.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cutlayer.core.state import Tensors

# Numbers generated at a time: enough to fill a GPU, few enough for a CPU's cache. The bits do not depend on it.
STRETCH = {"cpu": 1 << 15}
LONG_STRETCH = 1 << 19

MASK32 = (1 << 32) - 1
# Stafford's variant 13 of the MurmurHash3 finaliser, as in SplitMix64 (Steele, Lea and Flood 2014); signed 64 bits.
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX2 = 0x94D049BB133111EB - (1 << 64)

# Half the bits of 1.0, less the offset that makes a straight line between powers of 4 fit best.
HALF_EXPONENT = 0x1FF7A3BEA91D9B1B
LOG2 = 0.6931471805599453  # a literal: a library's logarithm is not the same everywhere


def seeds(key: int, num: int) -> Tensor:
    """Return `num` seeds from a key; each is sent as 8 bytes."""
    return mixed(torch.tensor(key) + GOLDEN * torch.arange(1, num + 1))


def child(seed: Tensor, number: int) -> Tensor:
    """Return the seed of a direction that is independent of its parent's and its siblings'."""
    return mixed(sibling(mixed(seed), number))


def sibling(hashed: Tensor, number: int) -> Tensor:
    """Return a seed of this number from a hashed seed; seeds of other numbers differ from it."""
    return hashed + ((GOLDEN * (number + 1) + (1 << 63)) % (1 << 64) - (1 << 63))


def shifted(params: Tensors, seed: Tensor, size: float) -> Tensors:
    """Return the parameters moved by `size` along the direction of a seed, as new tensors."""
    flat = torch.cat([u[0].to(_dtype(params)) for u in _stretches(seed[None], params)])
    return {name: p + size * u for (name, p), u in zip(params.items(), _taken_apart(flat, params), strict=True)}


def combined(like: Tensors, seeds: Tensor, factors: Tensor) -> Tensors:
    """Return the sum of the seeds' directions times their factors (float64), added in the order of the seeds."""
    sums = []
    for stretch in _stretches(seeds, like):
        total = stretch[0] * factors[0]
        for u, factor in zip(stretch[1:], factors[1:], strict=True):
            total = total + u * factor
        sums.append(total.to(_dtype(like)))
    return dict(zip(like, _taken_apart(torch.cat(sums), like), strict=True))


def _stretches(seeds: Tensor, like: Tensors) -> Iterator[Tensor]:
    """Yield the directions of all seeds, one stretch of the flattened parameters at a time."""
    length = sum(p.numel() for p in like.values())
    device = next((p.device for p in like.values()), torch.device("cpu"))
    stretch = max(2, STRETCH.get(device.type, LONG_STRETCH) // len(seeds) // 2 * 2)
    seeds = seeds.to(device)[:, None]
    if not length:
        yield torch.zeros(len(seeds), 0, dtype=torch.float64, device=device)
    for start in range(0, length, stretch):
        yield normals(seeds, start, min(start + stretch, length))


def _dtype(like: Tensors) -> torch.dtype:
    """Return a type that represents the values of all parameters exactly."""
    return functools.reduce(torch.promote_types, (p.dtype for p in like.values()), torch.float16)


def _taken_apart(flat: Tensor, like: Tensors) -> list[Tensor]:
    """Split a vector into tensors of these shapes and types."""
    pieces = torch.split(flat, [p.numel() for p in like.values()])
    return [piece.reshape(p.shape).to(p.dtype) for piece, p in zip(pieces, like.values(), strict=True)]


def normals(seed: Tensor, start: int, stop: int) -> Tensor:
    """Return numbers `start` (even) to `stop` of a seed: standard normal, float64. Seeds may end in an axis of 1.

    Box and Muller (1958): one 64-bit hash gives two uniform numbers, which give two normal ones.
    """
    pairs = torch.arange(start // 2, (stop + 1) // 2, device=seed.device)
    high, low = halves(mixed(mixed(seed) + GOLDEN * pairs))
    radius = sqrt(0.0 - 2.0 * log((high + 1).double() / 2.0**32))  # +0 where the logarithm is 0, never -0
    sine, cosine = sine_and_cosine(low.double() / 2.0**32)
    pair = torch.stack((radius * cosine, radius * sine), dim=-1)
    return pair.flatten(-2)[..., : stop - start]


def mixed(z: Tensor) -> Tensor:
    """Hash 64-bit integers, a bijection in which every bit affects all others; sums and products wrap around."""
    z = (z ^ _shifted_right(z, 30)) * MIX1
    z = (z ^ _shifted_right(z, 27)) * MIX2
    return z ^ _shifted_right(z, 31)


def _shifted_right(z: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros, whatever the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def halves(hashes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 32 bits as numbers from 0 up."""
    return _shifted_right(hashes, 32), hashes & MASK32


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of float64 numbers in (0, 1], to about 1e-15.

    x = m 2^e with m in [0.70, 1.41), and log m = 2 artanh(s) with s = (m - 1) / (m + 1), as a series in s².
    """
    half = 0x3FE6A09E00000000  # the bits of 0.7071...: numbers from there to twice that have exponent 0
    bits = _seen_as(x, torch.int64)
    exponent = (bits - half) >> 52
    m = _seen_as(bits - (exponent << 52), torch.float64)
    s = (m - 1.0) / (m + 1.0)
    return exponent.double() * LOG2 + 2.0 * s * _polynomial(s * s, [1 / (2 * k + 1) for k in range(10)])


def sqrt(x: Tensor) -> Tensor:
    """Return the square root of float64 numbers, to about 1e-15 (near 0 for 0): Newton's iteration."""
    # Start from half the exponent.
    root = _seen_as((_seen_as(x, torch.int64) >> 1) + HALF_EXPONENT, torch.float64)
    for _ in range(4):  # the relative errors are 0.035, 6e-4, 2e-7, 2e-14 and 2e-28, apart from rounding
        root = (root + x / root) * 0.5
    return root


class _View(torch.autograd.Function):
    """View the bits as another type. Up to torch 2.11, `vmap` does not support `Tensor.view` with a type."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing: there is no backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, int | None]:
        return _seen_as(x, dtype), in_dims[0]


def _seen_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    seen: Tensor = _View.apply(x, dtype)  # type: ignore[no-untyped-call]
    return seen


def sine_and_cosine(turns: Tensor) -> tuple[Tensor, Tensor]:
    """Return sine and cosine of float64 angles in [0, 1) turns, to about 1e-15: Taylor series up to 1/8 turn."""
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
    """Evaluate a polynomial by Horner's scheme; each product and sum is rounded separately."""
    total = x * coefficients[-1]
    for c in reversed(coefficients[1:-1]):
        total = (total + c) * x
    return total + coefficients[0]
