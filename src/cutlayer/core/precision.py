"""The arithmetic in which the layers of a model compute.

fp32   single precision, also for products on a GPU, where torch's default rounds the factors of convolutions.
tf32   on a GPU, the factors of products are rounded to TF32, which has 10 bits of fraction.
bf16   layers compute in bfloat16 by `torch.autocast`. Parameters, moments, means, losses and everything that is stored
       or crosses the cut stay in float32, so traffic is the same in every precision.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from cutlayer.core import tree
from cutlayer.core.masks import Key
from cutlayer.core.state import Tensors
from cutlayer.errors import ConfigError, UnknownNameError

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

_cudnn: Any = torch.backends.cudnn
_matmul: Any = torch.backends.cuda.matmul
_in_bfloat16: ContextVar[bool] = ContextVar("in_bfloat16", default=False)


@contextmanager
def computing(precision: Precision) -> Iterator[None]:
    """Set the precision of layers for the time of the context, and make cuDNN deterministic.

    These are global switches of torch: only one thread at a time may be inside.
    """
    before = _cudnn.deterministic, _cudnn.benchmark, _products()
    token = _in_bfloat16.set(precision == "bf16")
    try:
        _cudnn.deterministic, _cudnn.benchmark = True, False
        _set_products(("tf32" if precision == "tf32" else "ieee",) * 3)
        yield
    finally:
        _cudnn.deterministic, _cudnn.benchmark = before[:2]
        _set_products(before[2])
        _in_bfloat16.reset(token)


def layers(run: Callable[..., tuple[Any, Tensors]], values: Any, x: Any, key: Key | None) -> tuple[Any, Tensors]:
    """Call run(values, x, key) in the current precision; the output has the same type in every precision."""
    if not _in_bfloat16.get():
        return run(values, x, key)
    place = tree.tensors(x)[0].device.type
    if place == "meta":  # shapes do not depend on the precision
        return run(values, x, key)
    # No cache: a recording that is replayed must convert the weights each time.
    with torch.autocast(place, dtype=torch.bfloat16, cache_enabled=False):
        out, buffers = run(values, x, key)
    return tree.map(_single, out), buffers


def is_in_bfloat16() -> bool:
    """Return whether layers compute in bfloat16 here."""
    return _in_bfloat16.get()


def check_precision(precision: str, net: nn.Module) -> None:
    """Refuse an unknown name, and bfloat16 for a model that is not in float32."""
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    others = sorted({str(a.dtype).removeprefix("torch.") for a in net.parameters()} - {"float32"})
    if precision == "bf16" and others:
        raise ConfigError(
            f"precision 'bf16' is for models in float32, but this one has values in {' and '.join(others)}; "
            "use precision 'fp32', which leaves them as they are"
        )


def _single(a: Tensor) -> Tensor:
    return a.float() if a.dtype == torch.bfloat16 else a


def _products() -> tuple[str, ...]:
    """How torch rounds the factors of products in matrices, in convolutions and in recurrent layers."""
    return _matmul.fp32_precision, _cudnn.conv.fp32_precision, _cudnn.rnn.fp32_precision


def _set_products(values: tuple[str, ...]) -> None:
    # Older readers, torch's compiler among them, read `allow_tf32`; torch raises an error if the two do not agree.
    _matmul.allow_tf32, _cudnn.allow_tf32 = values[0] == "tf32", values[1] == "tf32"
    _matmul.fp32_precision, _cudnn.conv.fp32_precision, _cudnn.rnn.fp32_precision = values
