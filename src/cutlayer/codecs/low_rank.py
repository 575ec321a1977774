"""A codec that keeps a matrix of low rank."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.checks import check_count
from cutlayer.core.codec import Code, codec
from cutlayer.errors import WireError

MOST_BITS = 20  # of a whole number, with its sign apart
FIRST_BITS = 10  # of those that the iteration starts from
LEAST = 2.0**-1000  # what zeros, and numbers below it, are divided by
MANTISSA = 53  # bits of float64: sums of products of whole numbers up to there are exact in any order


@codec(drops=True, matrices=True)
@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Keeps the strongest directions of a matrix, found by power iteration (PowerSGD, Vogels et al. 2019).

    The second axis of a tensor has the rows of the matrix M, all later ones its columns. From a fixed Q, each iteration
    computes P = M Q, makes its columns orthonormal, and computes Q = M^T P; P Q^T arrives. (PowerSGD starts from the Q
    of the step before.) A tensor for which P and Q take no fewer elements crosses as it is.

    Products are those of whole numbers of about 20 bits, which float64 adds without rounding. So the bits do not depend
    on the order in which a device adds, and the result is that of M to about 1e-6 of its largest element. A tensor
    arrives as NaN if a value is not finite, or so large that P Q^T may overflow: above the largest number of the type
    divided by 2 sqrt(rows).
    """

    rank: int
    iterations: int = 2

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("iterations", self.iterations)

    def __str__(self) -> str:
        return f"lowrank({self.rank}{'' if self.iterations == 2 else f', iterations {self.iterations}'})"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        if not self._pays(tuple(a.shape)):
            return {"as_it_is": a}
        m, n = a.size(1), math.prod(a.shape[2:])
        bits = min(MOST_BITS, (MANTISSA - max(m, n).bit_length()) // 2)
        matrix, scale = _whole(a.reshape(-1, m, n).double(), bits, (1, 2))
        turned = matrix.transpose(1, 2)
        q = _start(n, self.rank, a)
        for i in range(self.iterations):
            p = _orthogonal(_columns(matrix @ q, bits), bits)
            q = turned @ p
            if i < self.iterations - 1:
                q = _columns(q, bits)
        lengths = directions.sqrt((p * p).sum(1, keepdim=True))
        lengths = torch.where(lengths > 0.5, lengths, 1.0)  # a column of zeros stays one
        least = 2.0**bits / torch.finfo(a.dtype).max * 2 * math.sqrt(m)
        lengths = torch.where(scale >= least, lengths, torch.nan)  # the scale of an infinite value is 0, or NaN
        return {"left": (p / lengths).to(a.dtype), "right": (q / lengths / scale).to(a.dtype)}

    def decode(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if "as_it_is" in code:
            same: Tensor = code["as_it_is"]
            return same
        # In float64, which neither autocast nor TF32 rounds.
        product: Tensor = code["left"].double() @ code["right"].double().transpose(1, 2)
        return product.to(dtype).reshape(shape)

    def check(self, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if "as_it_is" in code:
            return
        finite = code["left"].isfinite().flatten(1).all(1) & code["right"].isfinite().flatten(1).all(1)
        limit = torch.finfo(dtype).max * (1 - 2**-20)  # the order of a sum may change its last bits
        right = code["right"].double().transpose(1, 2)
        at_once = max(1, shape[1] * dtype.itemsize // 8)  # rows, so that the product takes no more than the tensor
        for rows in code["left"].split(at_once, 1):
            fits = (rows.double() @ right).abs_() <= limit
            if bool((finite & ~fits.flatten(1).all(1)).any()):
                raise WireError(f"the product of the matrices of {self} is too large")

    def _pays(self, shape: tuple[int, ...]) -> bool:
        m, n = shape[1], math.prod(shape[2:])
        return len(shape) > 2 and self.rank * (m + n) < m * n


def lowrank(*, rank: int, iterations: int = 2) -> LowRank:
    """A matrix of this rank by power iteration, for models."""
    return LowRank(rank=rank, iterations=iterations)


def _start(n: int, rank: int, like: Tensor) -> Tensor:
    hashed: Tensor = directions.mixed(torch.arange(n * rank, device=like.device) * directions.GOLDEN)
    numbers: Tensor = (hashed & ((1 << FIRST_BITS + 1) - 1)) - (1 << FIRST_BITS)
    return numbers.double().view(1, n, rank)


def _whole(matrix: Tensor, bits: int, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return whole numbers of so many bits, and what the numbers along these axes were multiplied with for it."""
    most = matrix.abs().amax(axes, keepdim=True)
    scale = torch.full_like(most, 2.0**bits) / most.clamp(min=LEAST)
    return (matrix * scale).round(), scale


def _columns(matrix: Tensor, bits: int) -> Tensor:
    """Return columns of whole numbers in the same directions; their lengths do not matter."""
    return _whole(matrix, bits, (1,))[0]


def _orthogonal(matrix: Tensor, bits: int) -> Tensor:
    """Return whole numbers whose columns are orthogonal, up to their rounding: the process of Gram and Schmidt."""
    done: list[Tensor] = []
    for column in matrix.unbind(2):
        for other in (*done, *done):  # once is not enough where little is left
            share = (other * column).sum(1, keepdim=True) / (other * other).sum(1, keepdim=True).clamp(min=1.0)
            column = _columns(column - share * other, bits)
        done.append(column)
    return torch.stack(done, dim=2)
