"""Random layers by key: the same masks on every engine and device, bit for bit.

A number is a function of the step's key, the unit, the random call within the unit and the element (a counter-based
generator of integer operations, as in `directions`). So nothing is stored, nothing waits for the host, and vmap,
recordings and compiled code can draw. Torch's generators can do none of this.
"""

import math
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cutlayer.core import directions

Key = int | Tensor  # a key of a step; a tensor has no axes and is int64
Replacement = Callable[..., Any]  # of a random function; returns NotImplemented if the call draws nothing

FIRST = 1 << 62  # of the numbers of seeds; those of directions are smaller
MOST_CALLS = 1 << 32  # in a unit
RANGE = 1 << 32  # of the random integers
SELU_FLOOR = 1.7580993408473766  # the negative of what SELU tends to: the value that alpha dropout sets
OTHER_NAMES = {"train": "training", "self": "input"}  # that functions of torch and of aten give to arguments


def on_device(key: Key, device: torch.device) -> Tensor:
    """Return a key as a tensor on the device on which it will be used; the host does not wait for a number."""
    return key.to(device) if isinstance(key, Tensor) else torch.full((), key, dtype=torch.int64, device=device)


class Masks(TorchFunctionMode):
    """Inside, torch's random functions draw their numbers from a key."""

    def __init__(self, key: Tensor) -> None:
        super().__init__()
        self._hashed = directions.mixed(key)
        self.begin(0)

    def begin(self, unit: int) -> None:
        """Draw for this unit from now on."""
        self._unit, self._calls = unit, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, *args, **(kwargs or {}))

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, or what replaces it."""
        own = REPLACED.get(func)
        if own is not None:
            made = own(self, *args, **{OTHER_NAMES.get(name, name): value for name, value in kwargs.items()})
            if made is not NotImplemented:
                return made
        return func(*args, **kwargs)

    def kept(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Return booleans that are False with probability p, to a precision of 2^-32."""
        least = round(p * RANGE)
        return self._in_order([half >= least for half in self._halves(shape)], shape)

    def uniform(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
        """Return numbers in [0, 1): multiples of 2^-32, or of what a smaller type can tell from 1."""
        bits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
        return self._in_order([(half >> (32 - bits)).to(dtype) / 2.0**bits for half in self._halves(shape)], shape)

    def _halves(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return a random integer below 2^32 for each even and for each odd element."""
        seed = directions.sibling(self._hashed, FIRST + self._unit * MOST_CALLS + self._calls)
        self._calls += 1
        pairs = torch.arange((math.prod(shape) + 1) // 2, device=seed.device)
        # Combined by xor: torch's compiler would take a product of `pairs` and a constant for an index of memory, which
        # may not overflow.
        return directions.halves(directions.mixed((pairs ^ directions.mixed(seed)) * directions.GOLDEN))

    def _in_order(self, halves: list[Tensor], shape: tuple[int, ...]) -> Tensor:
        return torch.stack(halves, dim=-1).flatten()[: math.prod(shape)].reshape(shape)


# -- what replaces torch's functions ----------------------------------------------------------------------------------


def _dropout(masks: Masks, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not _drops(p, training):
        return NotImplemented
    return _given(input, _dropped(input, masks.kept(input.shape, p), p), inplace)


def _native_dropout(masks: Masks, input: Tensor, p: float, training: bool | None) -> Any:
    if not _drops(p, training is not False):
        return NotImplemented
    kept = masks.kept(input.shape, p)
    return _dropped(input, kept, p), kept


def _feature_dropout(
    batched: int | None, masks: Masks, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    """Drop whole channels. An input with other than `batched` axes, if given, is one sample."""
    if not _drops(p, training):
        return NotImplemented
    shape = _channels(input, 2 if batched in (None, input.dim()) else 1)
    return _given(input, _dropped(input, masks.kept(shape, p), p), inplace)


def _alpha_dropout(
    channels: bool, masks: Masks, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Any:
    """Keep mean and variance: what is dropped is SELU's floor, and all is scaled and shifted."""
    if not _drops(p, training) or p == 1:  # which is zero everywhere
        return NotImplemented
    kept = masks.kept(_channels(input, 2) if channels else input.shape, p)
    scale = 1 / math.sqrt((SELU_FLOOR**2 * p + 1) * (1 - p))
    return _given(input, torch.where(kept, input, -SELU_FLOOR) * scale + SELU_FLOOR * scale * p, inplace)


def _rrelu(
    masks: Masks,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    if not training:
        return NotImplemented
    slope = (masks.uniform(input.shape) * (upper - lower) + lower).to(input.dtype)
    return _given(input, input * torch.where(input > 0, 1.0, slope), inplace)


def _torch_rrelu(
    inplace: bool,
    masks: Masks,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> Any:
    return NotImplemented if generator is not None else _rrelu(masks, input, lower, upper, training, inplace)


def _rand(masks: Masks, *size: Any, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Any:
    """Draw as `torch.rand`; options that say more than where and of which type are left to torch."""
    if any(value not in (None, False, torch.strided) for value in more.values()):
        return NotImplemented
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int | torch.SymInt) else size
    drawn = masks.uniform(tuple(shape), dtype or torch.get_default_dtype())
    return drawn.to(torch.get_default_device() if device is None else device)


def _rand_like(
    masks: Masks, input: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any
) -> Any:
    if any(value not in (None, False, torch.strided, torch.preserve_format) for value in more.values()):
        return NotImplemented
    return masks.uniform(input.shape, dtype or input.dtype).to(input.device if device is None else device)


def _bernoulli(
    inplace: bool, masks: Masks, input: Tensor, p: float | Tensor | None = None, *, generator: Any = None, **more: Any
) -> Any:
    """Draw ones with probability p; without one, `input` holds the probabilities."""
    if generator is not None or more:
        return NotImplemented
    rates = p if p is not None else 0.5 if inplace else input
    return _given(input, (masks.uniform(input.shape) < rates).to(input.dtype), inplace)


def _attention(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Torch's attention by the formula in its documentation; rows in which everything is masked give zeros."""
    if not _drops(dropout_p, True) or (is_causal and attn_mask is not None):  # which torch refuses
        return NotImplemented
    if attn_mask is not None and not (attn_mask.is_floating_point() or attn_mask.dtype == torch.bool):  # this, too
        return NotImplemented
    if enable_gqa:
        times = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            scores, attn_mask = scores + attn_mask, attn_mask != -math.inf
        nothing = ~attn_mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~attn_mask & ~nothing, -math.inf).masked_fill(nothing, 0.0)
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:
        weights = weights.masked_fill(nothing, 0.0)
    return _dropped(weights, masks.kept(weights.shape, dropout_p), dropout_p).to(value.dtype) @ value


def _multi_head_attention(masks: Masks, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own code with other random functions: inside of it, torch asks no mode."""
    theirs = F.multi_head_attention_forward
    own = {
        **vars(F),
        "has_torch_function": lambda _: False,
        "dropout": partial(masks.run, F.dropout),
        "scaled_dot_product_attention": partial(masks.run, F.scaled_dot_product_attention),
    }
    return FunctionType(theirs.__code__, own, argdefs=theirs.__defaults__)(*args, **kwargs)


def _drops(p: float, training: bool) -> bool:
    """Whether something is drawn; torch itself refuses what is no probability."""
    return training and 0 < p <= 1


def _dropped(input: Tensor, kept: Tensor, p: float) -> Tensor:
    """Multiply, so that NaN stays NaN, as in torch; booleans are small to keep for the backward pass."""
    return input * kept * (1 / (1 - p) if p < 1 else 0.0)


def _channels(input: Tensor, num: int) -> tuple[int, ...]:
    """Return the shape of a mask that has one element for whole channels."""
    return (*input.shape[:num], *(1 for _ in input.shape[num:]))


def _given(input: Tensor, out: Tensor, inplace: bool) -> Tensor:
    return input.copy_(out) if inplace else out


def _table() -> dict[Any, Replacement]:
    """Return what replaces each function. An operator of aten is called with or without its overload."""
    aten = torch.ops.aten
    feature, alpha, by_channel = (
        partial(_feature_dropout, None),
        partial(_alpha_dropout, False),
        partial(_alpha_dropout, True),
    )
    rows: list[tuple[Replacement, list[Any], list[Any]]] = [
        (_dropout, [F.dropout, torch.dropout], [aten.dropout]),
        (partial(_dropout, inplace=True), [torch.dropout_], [aten.dropout_]),
        (_native_dropout, [torch.native_dropout], [aten.native_dropout]),
        (partial(_feature_dropout, 3), [F.dropout1d], []),
        (partial(_feature_dropout, 5), [F.dropout3d], []),
        (feature, [F.dropout2d, torch.feature_dropout], [aten.feature_dropout]),
        (partial(feature, inplace=True), [torch.feature_dropout_], [aten.feature_dropout_]),
        (alpha, [F.alpha_dropout, torch.alpha_dropout], [aten.alpha_dropout]),
        (partial(alpha, inplace=True), [torch.alpha_dropout_], [aten.alpha_dropout_]),
        (by_channel, [F.feature_alpha_dropout, torch.feature_alpha_dropout], [aten.feature_alpha_dropout]),
        (partial(by_channel, inplace=True), [torch.feature_alpha_dropout_], [aten.feature_alpha_dropout_]),
        (_rrelu, [F.rrelu], []),
        (partial(_torch_rrelu, False), [torch.rrelu], [aten.rrelu]),
        (partial(_torch_rrelu, True), [torch.rrelu_], [aten.rrelu_]),
        (_attention, [F.scaled_dot_product_attention], [aten.scaled_dot_product_attention]),
        (_rand, [torch.rand], [aten.rand]),
        (_rand_like, [torch.rand_like], [aten.rand_like]),
        (partial(_bernoulli, False), [torch.bernoulli, Tensor.bernoulli, aten.bernoulli.p], [aten.bernoulli]),
        (partial(_bernoulli, True), [Tensor.bernoulli_, aten.bernoulli_.float, aten.bernoulli_.Tensor], []),
        (_multi_head_attention, [F.multi_head_attention_forward], []),
    ]
    return {
        function: own
        for own, functions, operators in rows
        for function in (*functions, *operators, *(operator.default for operator in operators))
    }


REPLACED = _table()
NAMES = frozenset(function.__name__.split(".")[0] for function in REPLACED)  # without the overloads of operators
