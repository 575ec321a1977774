"""Codecs that keep only some elements of each sample."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cutlayer.core import directions
from cutlayer.core.checks import check, is_number
from cutlayer.core.codec import NOTHING, Code, Codec, codec
from cutlayer.core.text import short
from cutlayer.errors import WireError

BLOCK = 256  # elements, so that a place in a block is one byte


def _dense(self: object, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the elements at their places, and zeros everywhere else."""
    values = code["values"]
    places = _unpacked(code["places"], values.size(1), math.prod(shape[1:]))
    return torch.zeros(shape, dtype=dtype, device=values.device).flatten(1).scatter(1, places, values).reshape(shape)


def _check(self: object, code: Code, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse places that are not different ones in order, one for each value."""
    packed, k, d = code["places"], code["values"].size(1), math.prod(shape[1:])
    if _are_bits(packed):
        bits = _bits(packed["bits"])
        if bool((bits.sum(1) != k).any() | bits[:, d:].any()):
            raise WireError(f"the bits of {self} do not name {k} of {d} elements")
    elif isinstance(packed, dict) and bool((packed["counts"] < 0).any() | (packed["counts"].sum(1) != k).any()):
        raise WireError(f"the blocks of {self} do not have {k} elements")
    places = _unpacked(packed, k, d)
    if bool((places < 0).any() | (places >= d).any() | (places.diff(dim=1) <= 0).any()):
        raise WireError(f"the places of {self} are not in order, or not all among {d} elements")


@codec(drops=True)
@dataclass(frozen=True, kw_only=True)
class TopK:
    """Keeps of each sample the elements of the largest magnitude; all others arrive as 0.

    Of d elements it keeps share * d, rounded up; among equal ones those with the lowest index. They cross in the order
    of their places, which take about a byte each, or a bit for each of the d elements if that is less. A sample with a
    value that is not finite arrives with one.
    """

    share: float

    def __post_init__(self) -> None:
        _check_share(self.share)

    def __str__(self) -> str:
        return f"topk({short(self.share)})"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        rows = a.flatten(1)
        k, size = _count(self.share, rows.size(1)), _magnitudes(rows)
        return _sparse(rows, size, _largest(size, k), k)

    decode, check = _dense, _check


@codec(draws=True, drops=True)
@dataclass(frozen=True, kw_only=True)
class RandTopK:
    """RandTopk (Zheng et al., IJCAI 2023): as top-k, but each choice is of the other elements with probability alpha.

    Of the k choices of a sample, a binomial number with this probability is of the other elements; within both groups
    elements are drawn evenly and without replacement. (In the paper a group that has been drawn from is a little less
    likely to be drawn from again.) As there, all elements that are not chosen arrive as 0.
    """

    share: float
    alpha: float = 0.1

    def __post_init__(self) -> None:
        _check_share(self.share)
        check(is_number(self.alpha) and 0 <= self.alpha <= 1, "alpha", self.alpha, "a probability from 0 to 1")

    def __str__(self) -> str:
        return f"randtopk({short(self.share)}, alpha {short(self.alpha)})"

    def encode(self, a: Tensor, key: Tensor) -> Code:
        rows = a.flatten(1)
        n, d = rows.shape
        k = _count(self.share, d)
        size = _magnitudes(rows)
        top = _largest(size, k)
        others = (_uniform(key, 0, n * k).view(n, k) < round(self.alpha * 2**32)).sum(1, keepdim=True)
        others = others.clamp(max=d - k)
        # A random order in which no two elements are equal.
        order = ((_uniform(key, 1, n * d).view(n, d) >> 1) << 31) | torch.arange(d, device=a.device)
        chosen = _first(order, top, k - others, k) | _first(order, ~top, others, k)
        return _sparse(rows, size, chosen, k)

    decode, check = _dense, _check


def topk(*, share: float) -> Codec:
    """The largest elements of each sample, and their places; `share` is the fraction that is kept."""
    made = TopK(share=share)  # which checks the share
    return made if share != 1 else NOTHING


def randtopk(*, share: float, alpha: float = 0.1) -> Codec:
    """As topk, but a fraction `alpha` of the elements is drawn from the smaller ones."""
    made = RandTopK(share=share, alpha=alpha)
    return made if share != 1 else NOTHING


def _check_share(share: object) -> None:
    check(is_number(share) and 0 < share <= 1, "share", share, "a fraction above 0 and up to 1")


def _count(share: float, d: int) -> int:
    """Return how many of d elements are kept; a product that is whole but for rounding is not rounded up."""
    return max(1, math.ceil(share * d - 1e-9))


def _magnitudes(rows: Tensor) -> Tensor:
    return rows.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _largest(size: Tensor, k: int) -> Tensor:
    """Return where the k largest elements of each row are; of equal ones those with the lowest index."""
    # Only the value of the least of them: the places that topk gives differ between devices.
    kept = size.topk(k, dim=1, sorted=False).values
    least = kept.amin(1, keepdim=True)
    equal, room = size == least, (kept == least).sum(1, keepdim=True, dtype=torch.int32)
    return (size > least) | (equal & (_numbered(equal) <= room))


def _numbered(chosen: Tensor) -> Tensor:
    """Return how many elements of each row are chosen up to each place."""
    return chosen.cumsum(1, dtype=torch.int32)


def _first(order: Tensor, group: Tensor, number: Tensor, k: int) -> Tensor:
    """Return where the first elements of a group are, at most k of each row."""
    ranked = torch.where(group, order, 1 << 62)
    smallest = ranked.topk(k, dim=1, largest=False, sorted=False).values.sort(1).values
    last = smallest.gather(1, (number - 1).clamp(min=0))
    return group & (ranked <= last) & (number > 0)


def _uniform(key: Tensor, stream: int, number: int) -> Tensor:
    """Return random integers below 2^32."""
    pairs = torch.arange(number, device=key.device)
    seed = directions.mixed(directions.sibling(directions.mixed(key), stream))
    return directions.halves(directions.mixed((pairs ^ seed) * directions.GOLDEN))[0]


# -- places -----------------------------------------------------------------------------------------------------------


def _sparse(rows: Tensor, size: Tensor, chosen: Tensor, k: int) -> Code:
    """Return the chosen elements, k of each row, in order, and their places."""
    places = _places(chosen, k)
    broken = size.amax(1, keepdim=True) == torch.inf
    return {"values": torch.where(broken, torch.nan, rows.gather(1, places)), "places": _packed(places, chosen)}


def _places(chosen: Tensor, k: int) -> Tensor:
    """Return the places of the k chosen elements of each row, in order."""
    return torch.searchsorted(_numbered(chosen), _numbered(torch.ones_like(chosen[:, :k])))


def _packed(places: Tensor, chosen: Tensor) -> Code:
    """Return places as bytes, in rows of several blocks with the number in each block; or as bits if that is less."""
    k, d = places.size(1), chosen.size(1)
    blocks = -(-d // BLOCK)
    if -(-d // 8) < k + 2 * blocks * (blocks > 1):
        padded = torch.nn.functional.pad(chosen, (0, -d % 8)).to(torch.uint8).reshape(len(chosen), -1, 8)
        return {"bits": (padded << _shifts(chosen.device)).sum(2, dtype=torch.uint8)}
    within = (places % BLOCK).to(torch.uint8)
    if blocks == 1:
        return within
    numbered = _numbered(chosen)
    up_to = torch.cat((torch.zeros_like(numbered[:, :1]), numbered[:, BLOCK - 1 : -1 : BLOCK], numbered[:, -1:]), dim=1)
    return {"within": within, "counts": up_to.diff(dim=1).to(torch.int16)}


def _are_bits(packed: Code) -> bool:
    return isinstance(packed, dict) and "bits" in packed


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _bits(packed: Tensor) -> Tensor:
    return ((packed[:, :, None] >> _shifts(packed.device)) & 1).flatten(1).bool()


def _unpacked(packed: Code, k: int, d: int) -> Tensor:
    if _are_bits(packed):
        return _places(_bits(packed["bits"])[:, :d].contiguous(), k)
    if not isinstance(packed, dict):
        plain: Tensor = packed.long()
        return plain
    ends: Tensor = packed["counts"].long().cumsum(1)
    started = torch.zeros(len(ends), k + 1, dtype=torch.int64, device=ends.device)
    block = started.scatter_add(1, ends, torch.ones_like(ends)).cumsum(1)[:, :k]
    places: Tensor = block * BLOCK + packed["within"].long()
    return places
